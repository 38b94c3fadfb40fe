"""Gemma 3: square images and, with pan and scan, crops of images. Attention within an image is bidirectional."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from omnizoo.models.hf_private import PACKED, attention_name
from omnizoo.models.media.features import Features
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features
from omnizoo.recipes.shared.gemma_encoders import PanAndScanEncoder


def merge_image_features(
    model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]
) -> dict[str, Any]:
    """Insert features. transformers builds masks from token types; packed attention receives spans instead."""
    merged = merge_features(model, inputs, features)
    if attention_name(model) == PACKED:
        return merged
    config: Any = model.config
    return merged | {"token_type_ids": (inputs["input_ids"] == config.image_token_id).long()}


def bidirectional_tokens(model: PreTrainedModel) -> BidirectionalTokens:
    """Return the tokens that attend in both directions."""
    config: Any = model.config
    return BidirectionalTokens((config.image_token_id,), ("image",))


IMAGE = EncoderSpec(PanAndScanEncoder, "<image_soft_token>", ("<start_of_image>", "<end_of_image>"))
RECIPE = Recipe(
    about="Gemma 3 4B to 27B",
    blocks=("Gemma3DecoderLayer", "SiglipEncoderLayer"),
    small_config={"vision_config": {"image_size": 112, "patch_size": 14}, "mm_tokens_per_image": 16},
    modalities=partial(build_modalities, {"image": IMAGE}),
    merge_features=merge_image_features,
    bidirectional=bidirectional_tokens,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.multi_modal_projector",)),),
)
