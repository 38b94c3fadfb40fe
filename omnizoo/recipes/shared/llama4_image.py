"""Image encoder of Llama 4: square tiles that are encoded separately, then the whole image as one more tile."""

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
from omnizoo.recipes.shared.image_encoders import TileEncoder
from omnizoo.recipes.shared.tensor_images import BILINEAR, TensorImageProcessor

BEGIN = "<|image_start|>"
COLUMN = "<|tile_x_separator|>"
ROW = "<|tile_y_separator|>"
WHOLE = "<|image|>"
END = "<|image_end|>"
MARKS = (BEGIN, COLUMN, ROW, WHOLE, END)
PUBLISHED = {"max_patches": 16, "resize_to_max_canvas": False, "resample": BILINEAR}


class CanvasEncoder(TileEncoder):
    """Image encoder of Llama 4.

    An image has at most `max_tiles` tiles on its canvas. If `max_tiles` is None, the folder's preprocessor config sets
    the limit.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_tiles: int | None = None) -> None:
        vision: Any = model.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        super().__init__(
            model,
            "vision_model",
            "multi_modal_projector",
            processor=TensorImageProcessor(folder, PUBLISHED | HALF, max_patches=max_tiles),
            edge=vision.image_size,
            patches=patches + 1,
            placeholders=patches // round(vision.pixel_shuffle_ratio**-2),
        )

    def tower_work(self) -> TowerFlops:
        return TowerFlops.of(self.tower, merging=("vision_adapter",), merge=self.patches // self.tile_placeholders)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of the canvas for an image.

        Among the canvases that the image fits on without shrinking, choose the canvas with the least enlargement, or
        with the most if `resize_to_max_canvas` is set. If there is no such canvas, choose the one with the least
        shrinking.
        """
        max_tiles = self.processor.settings["max_patches"]
        prefers_large = self.processor.settings["resize_to_max_canvas"]
        grids = [(rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles // rows + 1)]

        def order(grid: tuple[int, int]) -> tuple[bool, float, int]:
            scale = min(grid[0] * self.edge / height, grid[1] * self.edge / width)
            shrinks = scale < 1
            preference = -scale if prefers_large or shrinks else scale
            return shrinks, preference, math.prod(grid)

        return min(grids, key=order)

    def fitted(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of an image on its canvas.

        The aspect ratio is kept, and small images are enlarged at most to the edge of one tile. If the canvas
        limits the size, the division is in fp32, as in the model's processor, so that sides are rounded equally.
        """
        fills_canvas = self.processor.settings["resize_to_max_canvas"]

        def limit(side: int, tiles: int) -> Any:
            canvas_side = tiles * self.edge
            enlarged_side = max(side, self.edge)
            if fills_canvas or canvas_side < enlarged_side:
                return np.float32(canvas_side)
            return enlarged_side

        max_height = limit(height, canvas[0])
        max_width = limit(width, canvas[1])
        height_scale = max_height / height
        width_scale = max_width / width
        if width_scale < height_scale:
            return max(1, min(math.floor(height * width_scale), int(max_height))), int(max_width)
        return int(max_height), max(1, min(math.floor(width * height_scale), int(max_width)))

    def measure(self, media: Media) -> MediaSize:
        rows, columns = self.canvas(*image_size(media))
        num_tiles = rows * columns
        tile_rows: list[str | int] = []
        if num_tiles > 1:
            columns_with_separators: list[str | int] = [self.tile_placeholders, COLUMN] * columns
            tile_rows = [*columns_with_separators[:-1], ROW] * rows
            num_tiles += 1  # the whole image
        return self.size_of(num_tiles, (BEGIN, *tile_rows, WHOLE, self.tile_placeholders, END))

    def prepare(self, media: Media) -> Inputs:
        pixels = self.processor.read(media)
        height, width = pixels.shape[1:]
        canvas = self.canvas(height, width)
        tiles = self.processor.tiles(pixels, self.fitted(height, width, canvas), canvas, self.edge)
        if len(tiles) > 1:
            whole_image = self.processor.resize(pixels, self.edge, self.edge)
            tiles = torch.cat([tiles, whole_image[None]])
        return {"pixels": self.processor.values_in(tiles, torch.bfloat16)}

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        output = self.model.get_image_features(pixels, return_dict=True)
        features: torch.Tensor = self.projector(output[0])
        return features
