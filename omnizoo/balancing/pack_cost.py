"""Compute the cost of packs in FLOPs. Packs are assigned to ranks by their cost."""

from collections import Counter
from dataclasses import replace

from torch import nn

from omnizoo.data.packing.pack import Pack
from omnizoo.models.diffusion.flops import SampleFlops
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.flops import count_flops
from omnizoo.models.media.hf_model import media_model


class PackCost:
    """A function that returns the FLOPs of training on a pack.

    The encoding of media items is not included; it has separate costs (`MediaSize.cost`).

    Args:
        model: The model. It may be sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.flops = count_flops(model)
        self._sample_flops = SampleFlops(model) if denoiser_recipe(model) is not None else None
        self._bidirectional = media_model(model).bidirectional

    def __call__(self, pack: Pack) -> float:
        """Return the FLOPs of the model for a pack, without those of encoders."""
        if self._sample_flops is not None:
            samples = zip(pack.items, pack.lengths, strict=False)  # a dummy pack has no item
            return sum(sum(self._sample_flops.of(item.size, length)) for item, length in samples)
        fed_back: Counter[str] = Counter()  # number of placeholder tokens that decoders turn into inputs, by modality
        predicted: Counter[str] = Counter()  # number of placeholder tokens that decoders predict, by modality
        for item in pack.items:
            if item.port.role == "decoder":
                fed_back[item.port.modality] += item.size.num_placeholders
                predicted[item.port.modality] += item.size.num_placeholders * item.is_target
        return self.flops.of(pack.lengths, pack.num_targets, fed_back, predicted, self._pairs_ahead(pack))

    def with_media(self, pack: Pack) -> float:
        """Return the FLOPs for a pack: language model, decoder heads and media items."""
        return self(pack) + sum(item.size.cost for item in pack.items)

    def attention(self, pack: Pack) -> float:
        """Return only the FLOPs of attention for a pack, without encoders."""
        if self._sample_flops is not None:
            samples = zip(pack.items, pack.lengths, strict=False)
            return sum(self._sample_flops.of(item.size, length)[1] for item, length in samples)
        only_pairs = replace(self.flops, per_token=0.0, per_target=0.0)
        return only_pairs.of(pack.lengths, 0, {}, {}, self._pairs_ahead(pack))

    def _pairs_ahead(self, pack: Pack) -> int:
        """Return the number of pairs of tokens in which a token attends to a later one, within bidirectional spans."""
        if self._bidirectional is None:
            return 0
        runs = ((item.port.modality, length) for item in pack.items for _, length in item.spans)
        return self._bidirectional.pairs_ahead(runs)
