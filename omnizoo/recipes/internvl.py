"""InternVL: an image is one square tile, or several tiles and a thumbnail. The language model may be of any kind."""

from functools import partial
from typing import Any

from transformers import PreTrainedModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, load_processor, merge_features
from omnizoo.recipes.shared.image_encoders import TileEncoder

PUBLISHED = {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD}


class CroppedTileEncoder(TileEncoder):
    """Encoder that splits images into `min_tiles` to `max_tiles` tiles. The preprocessor config sets the defaults."""

    def __init__(
        self, model: PreTrainedModel, folder: str | None, min_tiles: int | None = None, max_tiles: int | None = None
    ) -> None:
        config: Any = model.config
        height, width = config.vision_config.image_size
        patch_height, patch_width = config.vision_config.patch_size
        processor = load_processor(
            GotOcr2ImageProcessorPil,
            folder,
            PUBLISHED,
            size={"height": height, "width": width},
            crop_to_patches=True,  # InternVL's processor always sets this, even if its config file differs
            min_patches=min_tiles,
            max_patches=max_tiles,
        )
        patches = (height // patch_height) * (width // patch_width)
        super().__init__(
            model,
            "model.vision_tower",
            "model.multi_modal_projector",
            processor=processor,
            edge=height,
            patches=patches,
            placeholders=round(patches * config.downsample_ratio**2),
        )

    def tiles(self, height: int, width: int) -> int:
        return int(self.processor.get_number_of_image_patches(height, width))

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        return ("<img>", tiles * self.tile_placeholders, "</img>")


RECIPE = Recipe(
    about="InternVL 3 and 3.5",
    small_config={"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}, "image_seq_length": 4},
    modalities=partial(
        build_modalities, {"image": EncoderSpec(CroppedTileEncoder, "<IMG_CONTEXT>", ("<img>", "</img>"))}
    ),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.multi_modal_projector",)),),
)
