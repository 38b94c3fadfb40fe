"""Compute the cost of packs, by which they are assigned to ranks."""

from collections import Counter
from dataclasses import replace

from torch import nn

from omnizoo.data.packing.pack import Pack
from omnizoo.models.flops import count_flops
from omnizoo.models.media.hf_model import media_model


class PackCost:
    """Callable that returns the FLOPs of training on a pack. Media items have separate costs (`MediaSize.cost`)."""

    def __init__(self, model: nn.Module) -> None:
        self.flops = count_flops(model)
        self._bidirectional = media_model(model).bidirectional

    def __call__(self, pack: Pack) -> float:
        """Return the FLOPs of the language model and the decoder heads."""
        fed_back: Counter[str] = Counter()
        predicted: Counter[str] = Counter()
        for item in pack.items:
            if item.port.role == "decoder":
                fed_back[item.port.modality] += item.size.num_placeholders
                predicted[item.port.modality] += item.size.num_placeholders * item.is_target
        return self.flops.of(pack.lengths, pack.num_targets, fed_back, predicted, self._pairs_ahead(pack))

    def with_media(self, pack: Pack) -> float:
        """Return the FLOPs of the language model, the decoder heads and the media items of the pack."""
        return self(pack) + sum(item.size.cost for item in pack.items)

    def attention(self, pack: Pack) -> float:
        """Return the FLOPs of attention in the language model only."""
        only_pairs = replace(self.flops, per_token=0.0, per_target=0.0)
        return only_pairs.of(pack.lengths, 0, {}, {}, self._pairs_ahead(pack))

    def _pairs_ahead(self, pack: Pack) -> int:
        """Return the number of pairs in which a token of a bidirectional span attends to a later token of the span."""
        if self._bidirectional is None:
            return 0
        runs = ((item.port.modality, length) for item in pack.items for _, length in item.spans)
        return self._bidirectional.pairs_ahead(runs)
