"""Gemma 3: pictures as one square each (or several, if the processor pans and scans), whose tokens see each other."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from omnizoo.models.hf_private import PACKED, attention_name
from omnizoo.models.media_batch import Features
from omnizoo.ops.mutual import MutualTokens
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.vision_towers import TileTower, build_vision, enter_features, image_processor

BEGIN, END = "\n\n<start_of_image>", "<end_of_image>\n\n"
# What the published processor takes where its files leave them out.
SCANNING = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


class PanTower(TileTower):
    """`pan_and_scan`: long pictures are shown whole, then in crops; by default what the folder's preprocessor says."""

    def __init__(self, model: PreTrainedModel, folder: str | None, pan_and_scan: bool | None = None) -> None:
        config: Any = model.config
        edge = config.vision_config.image_size
        processor = image_processor(
            Gemma3ImageProcessorPil, folder, {}, size={"height": edge, "width": edge}, do_pan_and_scan=pan_and_scan
        )
        self.scanning = {key: getattr(processor, key) or value for key, value in SCANNING.items()}
        for key, value in self.scanning.items():
            setattr(processor, key, value)
        patches = (edge // config.vision_config.patch_size) ** 2
        super().__init__(
            *(model, "model.vision_tower", "model.multi_modal_projector", processor),
            *(edge, patches, config.mm_tokens_per_image),
        )

    def tiles(self, height: int, width: int) -> int:
        if not self.processor.do_pan_and_scan:
            return 1
        empty = np.broadcast_to(np.uint8(0), (3, height, width))  # only its shape is looked at
        return 1 + len(self.processor.pan_and_scan(empty, **self.scanning))

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        whole = (BEGIN, self.each, END)
        if tiles == 1:
            return whole
        crops = [part for _ in range(tiles - 1) for part in (" ", *whole)][1:]
        told = " and here are some crops to help you see better "
        return ("Here is the original image ", *whole, told, *crops)


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Packed attention is told of tokens that see each other; transformers' own makes a mask of their types."""
    told = {}
    if attention_name(model) != PACKED:
        config: Any = model.config
        told["token_type_ids"] = (inputs["input_ids"] == config.image_token_id).long()
    return enter_features(model, inputs, features) | told


def mutual(model: PreTrainedModel) -> MutualTokens:
    config: Any = model.config
    return MutualTokens((config.image_token_id,), ("image",))


IMAGE = (PanTower, "<image_soft_token>", ("<start_of_image>", "<end_of_image>"))
RECIPE = Recipe(
    about="Gemma 3 4B to 27B",
    blocks=("Gemma3DecoderLayer", "SiglipEncoderLayer"),
    shrink={"vision_config": {"image_size": 112, "patch_size": 14}, "mm_tokens_per_image": 16},
    modalities=partial(build_vision, {"image": IMAGE}),
    enter=enter,
    mutual=mutual,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.multi_modal_projector",)},
)
