"""InternVL: pictures in squares, as many as fit their shape, and one more that shows the whole. Any language model."""

from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from omnizoo.recipes.base import Recipe
from omnizoo.recipes.vision_towers import TileTower, build_vision, enter_features, image_processor

PUBLISHED = {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}


class CutTower(TileTower):
    """Pictures of `min_tiles` to `max_tiles` squares; by default what the folder's preprocessor says."""

    def __init__(
        self, model: PreTrainedModel, folder: str | None, min_tiles: int | None = None, max_tiles: int | None = None
    ) -> None:
        config: Any = model.config
        (height, width), patch = config.vision_config.image_size, config.vision_config.patch_size
        processor = image_processor(
            *(GotOcr2ImageProcessorPil, folder, PUBLISHED),
            size={"height": height, "width": width},
            crop_to_patches=True,  # the published processor asks for it, whatever its file says
            min_patches=min_tiles,
            max_patches=max_tiles,
        )
        patches = (height // patch[0]) * (width // patch[1])
        each = round(patches * config.downsample_ratio**2)
        super().__init__(
            *(model, "model.vision_tower", "model.multi_modal_projector", processor, height, patches, each)
        )

    def tiles(self, height: int, width: int) -> int:
        tiles: int = self.processor.get_number_of_image_patches(height, width)
        return tiles

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        return ("<img>", tiles * self.each, "</img>")


RECIPE = Recipe(
    about="InternVL 3 and 3.5",
    shrink={"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}, "image_seq_length": 4},
    modalities=partial(build_vision, {"image": (CutTower, "<IMG_CONTEXT>", ("<img>", "</img>"))}),
    enter=enter_features,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.multi_modal_projector",)},
)
