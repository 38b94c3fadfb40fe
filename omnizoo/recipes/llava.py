"""LLaVA 1.5: square images, encoded by a CLIP tower without its last layer. The language model may be of any kind."""

from functools import partial
from typing import Any

import torch
from transformers import CLIPImageProcessorPil, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, load_processor, merge_features
from omnizoo.recipes.shared.image_encoders import TileEncoder


class ClipImageEncoder(TileEncoder):
    """Encoder for images that are cropped to a central square, as the folder's preprocessor config specifies."""

    def __init__(self, model: PreTrainedModel, folder: str | None) -> None:
        config: Any = model.config
        vision = config.vision_config
        if vision.model_type != "clip_vision_model":
            raise UserError(
                f"model.config.vision_config: {vision.model_type} towers of LLaVA are not supported. Use CLIP."
            )
        edge = vision.image_size
        processor = load_processor(
            CLIPImageProcessorPil,
            folder,
            {},
            size={"shortest_edge": edge},
            crop_size={"height": edge, "width": edge},
        )
        patches = (edge // vision.patch_size) ** 2
        keeps_class_token = config.vision_feature_select_strategy == "full"
        super().__init__(
            model,
            "model.vision_tower",
            "model.multi_modal_projector",
            processor=processor,
            edge=edge,
            patches=patches + 1,
            placeholders=patches + keeps_class_token,
        )

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.model.get_image_features(pixels, return_dict=True).pooler_output)


RECIPE = Recipe(
    about="LLaVA 1.5",
    small_config={
        "vision_config": {"image_size": 56, "patch_size": 14, "num_hidden_layers": 3},
        "image_seq_length": 16,
    },
    modalities=partial(build_modalities, {"image": EncoderSpec(ClipImageEncoder, "<image>")}),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.multi_modal_projector",)),),
)
