"""A user's recipe for a family that OmniZoo has none for: ViP-LLaVA, with square images."""

from functools import partial
from typing import Any

from transformers import CLIPImageProcessorPil, PreTrainedModel

from omnizoo import Recipe
from omnizoo.models.media.media_model import MediaModule
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, load_processor, merge_features
from omnizoo.recipes.shared.image_encoders import TileEncoder

TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"


class SquareImages(TileEncoder):
    def __init__(self, model: PreTrainedModel, folder: str | None, edge: int | None = None) -> None:
        config: Any = model.config
        vision = config.vision_config
        assert edge in (None, vision.image_size)
        edge = vision.image_size
        crop = {"height": edge, "width": edge}
        processor = load_processor(CLIPImageProcessorPil, folder, {}, size={"shortest_edge": edge}, crop_size=crop)
        patches = (edge // vision.patch_size) ** 2
        super().__init__(
            model, TOWER, PROJECTOR, processor=processor, edge=edge, patches=patches + 1, placeholders=patches
        )


RECIPE = Recipe(
    about="ViP-LLaVA",
    modalities=partial(build_modalities, {"image": EncoderSpec(SquareImages, "<image>")}),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", TOWER, projectors=(PROJECTOR,)),),
)

MODEL = {
    "model_type": "vipllava",
    "text_config": {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    "vision_feature_layers": [-2, -1],
    "image_seq_length": 16,
    "image_token_index": 24,
}
