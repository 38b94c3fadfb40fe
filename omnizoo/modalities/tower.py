"""The Hugging Face model inside an encoder: built from its config alone, with what it takes and costs."""

import copy
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from omnizoo.config.errors import UserError
from omnizoo.modalities.tally import Tally, is_trained


def tower_skeleton(config: PretrainedConfig | None, modality: str) -> PreTrainedModel:
    """The tower on meta: of a larger model its encoder for `modality`, of an encoder-decoder the encoder.

    Dropout is off, since its draws would depend on which other items a rank encodes.
    """
    if config is None:
        raise UserError(f"encoder: the {modality} encoder needs a `path` or a `config` of a Hugging Face model")
    if type(config) not in MODEL_MAPPING:
        raise UserError(
            f"encoder.config: transformers builds no `{config.model_type}` on its own; "
            "if it is part of a larger model, give the config of that"
        )
    config = copy.deepcopy(config)
    if config.is_encoder_decoder:
        config.decoder_layers = 0
    with torch.device("meta"):
        try:
            whole = AutoModel.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"encoder.config: `{config.model_type}`: {reason}") from error
        tower = whole.get_encoder(modality)
        if tower is whole and config.is_encoder_decoder:
            tower = whole.get_encoder()
        for name, value in tower.config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(tower.config, name, 0.0)
        # Outputs without a place in a composed model: a pooled vector, features for layers of the foundation.
        if hasattr(tower, "use_head"):
            tower.config.vision_use_head = False
        if hasattr(tower.config, "deepstack_visual_indexes"):
            tower.config.deepstack_visual_indexes = []
        skeleton = type(tower)(tower.config)
    assert isinstance(skeleton, PreTrainedModel)
    skeleton.eval()  # some towers draw random numbers in training, and meta has none
    return skeleton


def takes(tower: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(tower.forward).parameters


@dataclass(frozen=True)
class Work:
    """FLOPs of training a tower, or of running it, if it is frozen. Made once: a walk over all weights is slow."""

    trained: bool
    per_item: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0  # of tokens that attend to each other, in layers where all do
    per_near_pair: float = 0.0  # in layers that attend in windows of `window` tokens
    window: int = 0

    @classmethod
    def of(cls, tower: PreTrainedModel, merging: Sequence[str] = (), merge: int | None = None) -> "Work":
        """Of one whose matrices are all used once per token; or, after tokens were merged, once per `merge` of them:
        those of parts called mergers, and of `merging`."""
        config, tally = tower.config, Tally()
        merge = merge or getattr(config, "spatial_merge_size", 1) ** 2
        mergers = {name: part for name, part in tower.named_children() if "merger" in name or name in merging}
        for name, part in tower.named_children():
            if name not in mergers:
                tally.run(part, 1)
        layers = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None) or 1
        width = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None) or 1
        pair = Tally(tally.trained)
        pair.attend(1, width)
        for merger in mergers.values():
            tally.run(merger, 1 / merge)
        whole = len(getattr(config, "fullatt_block_indexes", range(layers)))
        window = (getattr(config, "window_size", 0) // getattr(config, "patch_size", 1)) ** 2 if whole < layers else 0
        near = (layers - whole) * pair.flops
        return cls(is_trained(tower), 0.0, tally.flops, whole * pair.flops, near, window)

    def flops(self, tokens: int) -> float:
        pairs = self.per_pair * tokens**2 + self.per_near_pair * tokens * min(tokens, self.window)
        return self.per_item + self.per_token * tokens + pairs


def preprocessor_settings(folder: str | None, part: str) -> dict[str, Any]:
    """How the published model was fed, from its folder: `image_processor` or `feature_extractor`."""
    if folder is None:
        return {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := Path(folder) / name).is_file():
            try:
                settings: dict[str, Any] = json.loads(file.read_text())
            except ValueError as error:
                raise UserError(f"{file}: not JSON: {error}") from error
            nested: dict[str, Any] = settings.get(part, settings if name.startswith("pre") else {})
            if nested:
                return nested
    return {}


def check_settings(where: str, processor: Any) -> None:
    """Refuse settings of a folder that its processor has taken, but cannot work with."""
    for name in ("sampling_rate", "hop_length", "n_fft", "feature_size", "rescale_factor"):
        value = getattr(processor, name, None)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UserError(f"{where}: {name} is {value!r}; expected a number above 0")
    for name in ("image_mean", "image_std"):
        value = getattr(processor, name, None)
        numbers = list(value) if isinstance(value, list | tuple | str) else [value]
        if value is not None and not (len(numbers) in (1, 3) and all(isinstance(n, int | float) for n in numbers)):
            raise UserError(f"{where}: {name} is {value!r}; expected three numbers")
