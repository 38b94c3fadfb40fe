"""Gemma 4: pictures and frames of clips, whose tokens see each other in layers with a window (in larger ones), sound;
experts (26B-A4B)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.hf_private import PACKED, attention_name
from omnizoo.models.media_batch import Features
from omnizoo.ops.mutual import MutualTokens
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.gemma_clips import PooledClips
from omnizoo.recipes.gemma_towers import BEGIN, END, SOUND_BEGIN, SOUND_END, MelTower, PoolTower
from omnizoo.recipes.qwen_towers import put
from omnizoo.recipes.vision_towers import Kinds, build_vision

KINDS = {
    "image": (PoolTower, "<|image|>", (BEGIN, END)),
    "video": (PooledClips, "<|video|>", (BEGIN, END)),
    "audio": (MelTower, "<|audio|>", (SOUND_BEGIN, SOUND_END)),
}


def modalities(kinds: Kinds, model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Larger models have no ears."""
    parts = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}
    present = {name: kind for name, kind in kinds.items() if getattr(model.config, parts[name]) is not None}
    return build_vision(present, model, folder, options)


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """In the place of an item is, for the embeddings of layers too, a token of padding."""
    config: Any = model.config
    ids = inputs["input_ids"]
    is_place = (ids == config.image_token_id) | (ids == config.audio_token_id) | (ids == config.video_token_id)
    text = ids.masked_fill(is_place, config.text_config.pad_token_id)
    embeddings = model.get_input_embeddings()(text)
    told = {}
    if getattr(config.text_config, "hidden_size_per_layer_input", 0):
        core: Any = model.get_submodule("model.language_model")
        told["per_layer_inputs"] = core.get_per_layer_inputs(text, embeddings)
    if attention_name(model) != PACKED:  # which is told otherwise
        told["mm_token_type_ids"] = ((ids == config.image_token_id) | (ids == config.video_token_id)).long()
    for arrived in features.values():
        embeddings = put(embeddings, arrived.index, arrived.values)
    return inputs | {"input_ids": None, "inputs_embeds": embeddings} | told


def mutual(model: PreTrainedModel) -> MutualTokens | None:
    config: Any = model.config
    if config.text_config.use_bidirectional_attention != "vision":
        return None
    return MutualTokens((config.image_token_id, config.video_token_id), ("image", "video"), everywhere=False)


RECIPE = Recipe(
    about="Gemma 4 E2B, E4B, 26B-A4B, 31B",
    has_experts=True,
    blocks=("Gemma4TextDecoderLayer", "Gemma4VisionEncoderLayer", "Gemma4AudioLayer"),
    shrink={
        "vision_config": {"num_key_value_heads": 4, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": {"subsampling_conv_channels": [32, 4]},
    },
    modalities=partial(modalities, KINDS),
    enter=enter,
    mutual=mutual,
    towers={"image": "model.vision_tower", "video": "model.vision_tower", "audio": "model.audio_tower"},
    projectors={"image": ("model.embed_vision",), "video": ("model.embed_vision",), "audio": ("model.embed_audio",)},
)
