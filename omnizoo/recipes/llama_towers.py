"""How pictures enter Llama 4: on a canvas of squares, each of which is seen by itself, and once more as a whole."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import picture_size
from omnizoo.modalities.item import Media
from omnizoo.modalities.tower import Work
from omnizoo.recipes.tensor_pictures import BILINEAR, TensorPictures
from omnizoo.recipes.vision_towers import TileTower

BEGIN, COLUMN, ROW, WHOLE, END = MARKS = (
    *("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>"),
)
HALF = [0.5] * 3
PUBLISHED = {"max_patches": 16, "resize_to_max_canvas": False, "resample": BILINEAR}


class CanvasTower(TileTower):
    """Pictures of at most `max_tiles` squares; by default what the folder's preprocessor says."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_tiles: int | None = None) -> None:
        vision: Any = model.config.vision_config
        look = TensorPictures(folder, PUBLISHED | {"image_mean": HALF, "image_std": HALF}, max_patches=max_tiles)
        patches = (vision.image_size // vision.patch_size) ** 2
        each = patches // round(vision.pixel_shuffle_ratio**-2)
        super().__init__(*(model, "vision_model", "multi_modal_projector", look, vision.image_size, patches + 1, each))

    def tower_work(self) -> Work:
        return Work.of(self.tower, merging=("vision_adapter",), merge=self.patches // self.each)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares in which it has to grow least; where it has to shrink, to shrink least."""
        most, grows = self.processor.told["max_patches"], self.processor.told["resize_to_max_canvas"]
        grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]

        def order(grid: tuple[int, int]) -> tuple[bool, float, int]:
            scale = min(grid[0] * self.edge / height, grid[1] * self.edge / width)
            return scale < 1, -scale if grows or scale < 1 else scale, math.prod(grid)

        return min(grids, key=order)

    def fitted(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """Its size on the canvas: it keeps its shape, and grows to the edge of one square at most. Where the canvas is
        the limit, the published code divides in single precision, which decides how sides are rounded."""
        grows, limits = self.processor.told["resize_to_max_canvas"], []
        for side, squares in zip((height, width), canvas, strict=True):
            most, wanted = squares * self.edge, max(side, self.edge)
            limits.append(np.float32(most) if grows or most < wanted else wanted)
        down, across = limits[0] / height, limits[1] / width
        if across < down:
            return max(1, min(math.floor(height * across), int(limits[0]))), int(limits[1])
        return int(limits[0]), max(1, min(math.floor(width * down), int(limits[1])))

    def measure(self, media: Media) -> Size:
        rows, columns = self.canvas(*picture_size(media))
        lines: list[str | int] = []
        for _ in range(rows if rows * columns > 1 else 0):
            lines += [*[part for _ in range(columns) for part in (self.each, COLUMN)][:-1], ROW]
        return self.size_of(rows * columns + (rows * columns > 1), (BEGIN, *lines, WHOLE, self.each, END))

    def prepare(self, media: Media) -> Inputs:
        pixels, edge = self.processor.read(media), self.edge
        given = pixels.shape[1], pixels.shape[2]
        rows, columns = canvas = self.canvas(*given)
        height, width = self.fitted(*given, canvas)
        shown = pad(self.processor.resize(pixels, height, width), (0, columns * edge - width, 0, rows * edge - height))
        tiles = shown.view(3, rows, edge, columns, edge).permute(1, 3, 0, 2, 4).flatten(0, 1)
        if len(tiles) > 1:
            tiles = torch.cat([tiles, self.processor.resize(pixels, edge, edge)[None]])
        return {"pixels": self.processor.values_in(tiles, torch.bfloat16)}

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.projector(self.model.get_image_features(pixels, return_dict=True)[0])
        return features
