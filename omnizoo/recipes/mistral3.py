"""Mistral 3 (Small 3.1 and later): pictures of any shape by the Pixtral tower, row by row. Any language model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import picture_size, read_picture
from omnizoo.modalities.item import Media
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.vision_towers import PatchTower, build_vision, enter_features, image_processor

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class RowTower(PatchTower):
    """Pictures of at most `max_edge` pixels along an edge; by default what the folder's preprocessor says."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_edge: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.multi_modal_projector")
        config: Any = model.config
        self.patch: int = config.vision_config.patch_size
        self.factor: int = self.patch * config.spatial_merge_size  # pixels along the edge of one place's square
        published = {"size": {"longest_edge": config.vision_config.image_size}}
        square = {"height": self.factor, "width": self.factor}
        limit = {"longest_edge": max_edge} if max_edge else None
        self.processor = image_processor(PixtralImageProcessorPil, folder, published, patch_size=square, size=limit)

    def measure(self, media: Media) -> Size:
        size, empty = self.processor.size, np.broadcast_to(np.uint8(0), (3, *picture_size(media)))
        most = (size.longest_edge,) * 2 if size.longest_edge else (size.height, size.width)
        height, width = get_resize_output_image_size(empty, most, (self.factor,) * 2, ChannelDimension.FIRST)
        rows, columns = height // self.factor, width // self.factor
        lines = [part for _ in range(rows) for part in (columns, BREAK)]
        return self.size_of(height * width // self.patch**2, rows * columns, (*lines[:-1], END))

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": self.processor(images=read_picture(media), return_tensors="pt")["pixel_values"][0]}

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(3, self.factor, self.factor)}

    def places(self, inputs: Inputs) -> int:
        return inputs["pixels"][0].numel() // self.factor**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Pixels are padded to the largest picture, of which the tower sees what is theirs."""
        shapes = [tuple(item["pixels"].shape[1:]) for item in items]
        height, width = (max(edges) for edges in zip(*shapes, strict=True))
        filled = [
            pad(item["pixels"], (0, width - w, 0, height - h)) for item, (h, w) in zip(items, shapes, strict=True)
        ]
        layer = self.model.config.vision_feature_layer
        out = self.tower(torch.stack(filled), image_sizes=shapes, output_hidden_states=layer != -1, return_dict=True)
        chosen = [out.last_hidden_state] if layer == -1 else [out.hidden_states[n] for n in np.atleast_1d(layer)]
        features: torch.Tensor = self.projector(torch.cat(chosen, -1).squeeze(0), shapes)
        return features


RECIPE = Recipe(
    about="Mistral Small 3.1 and 3.2, Ministral 3",
    shrink={"vision_config": {"image_size": 112, "patch_size": 14}},
    modalities=partial(build_vision, {"image": (RowTower, "[IMG]", (BREAK, END))}),
    enter=enter_features,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.multi_modal_projector",)},
)
