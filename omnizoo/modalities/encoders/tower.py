"""The tower of an encoder: how it is built from a Hugging Face config, the arguments it accepts, and its FLOPs."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.flop_count import FlopCounter, is_trained


def tower_skeleton(config: PretrainedConfig | None, modality: str) -> PreTrainedModel:
    """Build the tower on the meta device.

    If `config` describes a larger model, the tower is its encoder for `modality`. For an encoder-decoder model, it is
    the encoder.
    Dropout is disabled, because its random numbers would depend on which other items a rank encodes.
    """
    if config is None:
        raise UserError(f"encoder: the {modality} encoder needs `path` or `config`. Set one to a Hugging Face model.")
    if type(config) not in MODEL_MAPPING:
        raise UserError(
            f"encoder.config: transformers cannot build `{config.model_type}` separately. "
            "If it is part of a larger model, use the config of that model."
        )
    config = copy.deepcopy(config)
    if config.is_encoder_decoder:
        config.decoder_layers = 0
    with torch.device("meta"):
        try:
            model = AutoModel.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            raise UserError(f"encoder.config: cannot build `{config.model_type}`: {first_line(error)}") from error
        tower = model.get_encoder(modality)
        if tower is model and config.is_encoder_decoder:
            tower = model.get_encoder()
        for name, value in tower.config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(tower.config, name, 0.0)
        # A composed model uses neither a pooled vector nor features for layers of the foundation (deepstack).
        if hasattr(tower, "use_head"):
            tower.config.vision_use_head = False
        if hasattr(tower.config, "deepstack_visual_indexes"):
            tower.config.deepstack_visual_indexes = []
        skeleton = type(tower)(tower.config)
    assert isinstance(skeleton, PreTrainedModel)
    skeleton.eval()  # in training mode, some towers sample random numbers; the meta device does not support this
    return skeleton


def takes(tower: PreTrainedModel, name: str) -> bool:
    """Whether the forward of a tower has the argument `name`."""
    return name in inspect.signature(tower.forward).parameters


@dataclass(frozen=True)
class TowerFlops:
    """FLOPs of training a tower, or of its forward pass if it is frozen.

    Computed once per tower, because iterating over all weights is slow.
    """

    trained: bool
    per_item: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0  # per pair of tokens, in layers with full attention
    per_near_pair: float = 0.0  # per pair of tokens, in layers with window attention
    window: int = 0  # tokens per window

    @classmethod
    def of(cls, tower: PreTrainedModel, merging: Sequence[str] = (), merge: int | None = None) -> "TowerFlops":
        """Count the FLOPs of a tower that uses each matrix once per token, or once per `merge` tokens after merging.

        The matrices after merging belong to submodules named mergers and to the submodules in `merging`.
        """
        config = tower.config
        counter = FlopCounter()
        merge = merge or getattr(config, "spatial_merge_size", 1) ** 2
        mergers = {name: part for name, part in tower.named_children() if "merger" in name or name in merging}
        for name, part in tower.named_children():
            if name not in mergers:
                counter.run(part, 1)
        layers = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None) or 1
        width = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None) or 1
        pair = FlopCounter(counter.trained)
        pair.attend(1, width)
        for merger in mergers.values():
            counter.run(merger, 1 / merge)

        full_layers = len(getattr(config, "fullatt_block_indexes", range(layers)))
        window = 0
        if full_layers < layers:
            window = (getattr(config, "window_size", 0) // getattr(config, "patch_size", 1)) ** 2
        return cls(
            trained=is_trained(tower),
            per_token=counter.flops,
            per_pair=full_layers * pair.flops,
            per_near_pair=(layers - full_layers) * pair.flops,
            window=window,
        )

    def flops(self, tokens: int) -> float:
        """Return the FLOPs of an item with `tokens` tokens that attend to each other."""
        pairs = self.per_pair * tokens**2 + self.per_near_pair * tokens * min(tokens, self.window)
        return self.per_item + self.per_token * tokens + pairs
