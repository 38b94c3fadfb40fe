"""Gemma 4: images, video, audio (E2B and E4B only); dense or mixture of experts (26B-A4B).

If the config enables it, tokens of an image or frame attend in both directions, but only in sliding-window layers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.hf_private import PACKED, attention_name
from omnizoo.models.media.features import Features
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options, Recipe
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens
from omnizoo.recipes.shared import gemma_encoders as gemma
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features, visual_modules
from omnizoo.recipes.shared.gemma_video import PooledVideoEncoder

ENCODERS = {
    "image": EncoderSpec(gemma.PooledImageEncoder, "<|image|>", (gemma.BEGIN, gemma.END)),
    "video": EncoderSpec(PooledVideoEncoder, "<|video|>", (gemma.BEGIN, gemma.END)),
    "audio": EncoderSpec(gemma.MelAudioEncoder, "<|audio|>", (gemma.AUDIO_BEGIN, gemma.AUDIO_END)),
}
CONFIG_FIELDS = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}


def build_encoders(
    specs: Mapping[str, EncoderSpec], model: PreTrainedModel, folder: str | None, options: Options
) -> dict[str, Modality]:
    """Build the encoders that this model has. For example, 26B-A4B and 31B have no audio encoder."""
    available = {name: spec for name, spec in specs.items() if getattr(model.config, CONFIG_FIELDS[name]) is not None}
    return build_modalities(available, model, folder, options)


def merge_media(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Insert media features. Placeholders use the embedding of the padding token, also in per-layer embeddings."""
    config: Any = model.config
    input_ids = inputs["input_ids"]
    is_visual = (input_ids == config.image_token_id) | (input_ids == config.video_token_id)
    is_placeholder = is_visual | (input_ids == config.audio_token_id)
    text_ids = input_ids.masked_fill(is_placeholder, config.text_config.pad_token_id)
    embeddings = model.get_input_embeddings()(text_ids)
    extra_inputs = {}
    if getattr(config.text_config, "hidden_size_per_layer_input", 0):
        language_model: Any = model.get_submodule("model.language_model")
        extra_inputs["per_layer_inputs"] = language_model.get_per_layer_inputs(text_ids, embeddings)
    if attention_name(model) != PACKED:  # transformers builds masks from token types; packed attention uses spans
        extra_inputs["mm_token_type_ids"] = is_visual.long()
    return merge_features(model, inputs | {"inputs_embeds": embeddings}, features) | extra_inputs


def bidirectional_tokens(model: PreTrainedModel) -> BidirectionalTokens | None:
    """Return the tokens that attend in both directions; None if the model is fully causal."""
    config: Any = model.config
    if config.text_config.use_bidirectional_attention != "vision":
        return None
    return BidirectionalTokens((config.image_token_id, config.video_token_id), ("image", "video"), everywhere=False)


RECIPE = Recipe(
    about="Gemma 4 E2B, E4B, 26B-A4B, 31B",
    has_experts=True,
    blocks=("Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer", "Gemma4AudioLayer"),
    small_config={
        "vision_config": {"num_key_value_heads": 4, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": {"subsampling_conv_channels": [32, 4]},
    },
    modalities=partial(build_encoders, ENCODERS),
    merge_features=merge_media,
    bidirectional=bidirectional_tokens,
    media_modules=(
        *visual_modules("model.vision_tower", "model.embed_vision"),
        MediaModule("audio", "encoder", "model.audio_tower", projectors=("model.embed_audio",)),
    ),
)
