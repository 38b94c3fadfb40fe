"""The Hugging Face model inside an encoder: built from its config alone, with what it takes."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from omnizoo.config.errors import UserError


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


def layers_of(config: PretrainedConfig) -> tuple[int, int]:
    """How many layers attend, and their width."""
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None) or 1
    width = getattr(config, "embed_dim", None) or getattr(config, "hidden_size", None) or 1
    return layers, width


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
