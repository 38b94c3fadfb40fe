"""LLaVA 1.5: pictures as one square each, by a CLIP tower whose last layer is left out. Any language model."""

from functools import partial
from typing import Any

import torch
from transformers import CLIPImageProcessorPil, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.vision_towers import TileTower, build_vision, enter_features, image_processor


class SquareTower(TileTower):
    """Pictures cut to a square from their middle, as the folder's preprocessor says."""

    def __init__(self, model: PreTrainedModel, folder: str | None) -> None:
        config: Any = model.config
        vision = config.vision_config
        if vision.model_type != "clip_vision_model":
            raise UserError(
                f"model.config.vision_config: {vision.model_type} towers of LLaVA are not supported: use CLIP"
            )
        edge = vision.image_size
        processor = image_processor(
            *(CLIPImageProcessorPil, folder, {}),
            size={"shortest_edge": edge},
            crop_size={"height": edge, "width": edge},
        )
        patches = (edge // vision.patch_size) ** 2
        each = patches + (config.vision_feature_select_strategy == "full")  # with the token of the class
        super().__init__(
            *(model, "model.vision_tower", "model.multi_modal_projector", processor, edge, patches + 1, each)
        )

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.model.get_image_features(pixels, return_dict=True).pooler_output)


RECIPE = Recipe(
    about="LLaVA 1.5",
    shrink={"vision_config": {"image_size": 56, "patch_size": 14, "num_hidden_layers": 3}, "image_seq_length": 16},
    modalities=partial(build_vision, {"image": (SquareTower, "<image>", ())}),
    enter=enter_features,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.multi_modal_projector",)},
)
