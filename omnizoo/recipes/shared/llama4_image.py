"""Encoder for images of Llama 4: square tiles that are encoded separately, then the whole image as one more tile."""

import math
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.modalities.encoders.tower import TowerFlops
from omnizoo.modalities.files.image import image_size
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import HALF
from omnizoo.recipes.shared.image_encoders import TileTower
from omnizoo.recipes.shared.tensor_images import BILINEAR, TensorPictures

BEGIN, COLUMN, ROW, WHOLE, END = MARKS = (
    *("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>"),
)
PUBLISHED = {"max_patches": 16, "resize_to_max_canvas": False, "resample": BILINEAR}


class CanvasTower(TileTower):
    """Image encoder of Llama 4.

    An image has at most `max_tiles` tiles on its canvas. None uses the setting of the folder's preprocessor.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_tiles: int | None = None) -> None:
        vision: Any = model.config.vision_config
        look = TensorPictures(folder, PUBLISHED | HALF, max_patches=max_tiles)
        patches = (vision.image_size // vision.patch_size) ** 2
        each = patches // round(vision.pixel_shuffle_ratio**-2)
        super().__init__(*(model, "vision_model", "multi_modal_projector", look, vision.image_size, patches + 1, each))

    def tower_work(self) -> TowerFlops:
        return TowerFlops.of(self.tower, merging=("vision_adapter",), merge=self.patches // self.each)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of the canvas for an image.

        Among canvases that an image fits without shrinking, choose the one with the least enlargement, or with the most
        if `resize_to_max_canvas` is set. If there is none, choose the one with the least shrinking.
        """
        most, grows = self.processor.settings["max_patches"], self.processor.settings["resize_to_max_canvas"]
        grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]

        def order(grid: tuple[int, int]) -> tuple[bool, float, int]:
            scale = min(grid[0] * self.edge / height, grid[1] * self.edge / width)
            return scale < 1, -scale if grows or scale < 1 else scale, math.prod(grid)

        return min(grids, key=order)

    def fitted(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of an image on its canvas.

        The aspect ratio is kept, and small images are enlarged at most to the edge of one tile. If the canvas is the
        limit, the model's processor divides in fp32, which decides how sides are rounded.
        """
        grows, limits = self.processor.settings["resize_to_max_canvas"], []
        for side, squares in zip((height, width), canvas, strict=True):
            most, wanted = squares * self.edge, max(side, self.edge)
            limits.append(np.float32(most) if grows or most < wanted else wanted)
        down, across = limits[0] / height, limits[1] / width
        if across < down:
            return max(1, min(math.floor(height * across), int(limits[0]))), int(limits[1])
        return int(limits[0]), max(1, min(math.floor(width * down), int(limits[1])))

    def measure(self, media: Media) -> MediaSize:
        rows, columns = self.canvas(*image_size(media))
        lines: list[str | int] = []
        for _ in range(rows if rows * columns > 1 else 0):
            lines += [*[part for _ in range(columns) for part in (self.each, COLUMN)][:-1], ROW]
        return self.size_of(rows * columns + (rows * columns > 1), (BEGIN, *lines, WHOLE, self.each, END))

    def prepare(self, media: Media) -> Inputs:
        pixels, edge = self.processor.read(media), self.edge
        height, width = pixels.shape[1:]
        canvas = self.canvas(height, width)
        tiles = self.processor.tiles(pixels, self.fitted(height, width, canvas), canvas, edge)
        if len(tiles) > 1:
            tiles = torch.cat([tiles, self.processor.resize(pixels, edge, edge)[None]])
        return {"pixels": self.processor.values_in(tiles, torch.bfloat16)}

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.projector(self.model.get_image_features(pixels, return_dict=True)[0])
        return features
