"""Base classes of image encoders: `TileEncoder` for tiles of one size, `PatchEncoder` for images of any shape."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import ImageTowerEncoder

TILES_PER_PART = 4  # tiles per part: larger images are split, so that several ranks can encode them


class TileEncoder(ImageTowerEncoder):
    """Encoder for square tiles.

    Args:
        model: The model.
        tower: Path of the tower in the model.
        projector: Path of the projector in the model.
        processor: Image processor of the model family.
        edge: Side of a tile, in pixels.
        patches: Number of patches per tile.
        placeholders: Number of placeholder tokens per tile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tower: str,
        projector: str,
        *,
        processor: Any,
        edge: int,
        patches: int,
        placeholders: int,
    ) -> None:
        super().__init__(model, tower, projector)
        self.processor = processor
        self.edge = edge
        self.patches = patches
        self.tile_placeholders = placeholders

    def tiles(self, height: int, width: int) -> int:
        """Return the number of tiles of an image of this size."""
        return 1

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        """Return `MediaSize.layout` of an image with `tiles` tiles, as the model's own processor writes it."""
        return ()

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode `[tiles, channels, edge, edge]` to features `[tiles, placeholders, width]`."""
        features: torch.Tensor = self.model.get_image_features(pixels, return_dict=True).pooler_output
        return features

    def measure(self, media: Media) -> MediaSize:
        tiles = self.tiles(*image_size(media))
        return self.size_of(tiles, self.layout(tiles))

    def size_of(self, tiles: int, layout: tuple[Any, ...]) -> MediaSize:
        """Return the size of an image with `tiles` tiles."""
        return MediaSize(tiles * self.tile_placeholders, tiles * self.cost, layout=layout)

    @cached_property
    def cost(self) -> float:
        """FLOPs of one tile."""
        return self.flops(self.patches, self.tile_placeholders)

    def prepare(self, media: Media) -> Inputs:
        out = self.processor(images=read_image(media), return_tensors="pt")
        return {"pixels": out["pixel_values"].flatten(0, -4)}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        pieces = inputs["pixels"].split(TILES_PER_PART)
        if len(pieces) == 1:
            return [(size, inputs)]
        parts: list[tuple[MediaSize, Inputs]] = []
        for tiles in pieces:
            # Clone the tiles, because a view would be sent with its whole storage.
            parts.append((self.size_of(len(tiles), size.layout), {"pixels": tiles.clone()}))
        return parts

    def dummy_input(self) -> Inputs:
        return {"pixels": torch.zeros(1, 3, self.edge, self.edge)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return len(inputs["pixels"]) * self.tile_placeholders

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        return self.features(torch.cat([item["pixels"] for item in items])).flatten(0, 1)


class PatchEncoder(ImageTowerEncoder):
    """Encoder for images of any shape. All items form one sequence of patches, and attention stays within an item."""

    packs_items = True

    def size_of(self, patches: int, placeholders: int, layout: tuple[str | int, ...]) -> MediaSize:
        """Return the size of an image with this number of patches and placeholder tokens."""
        return MediaSize(placeholders, self.flops(patches, placeholders), layout=layout)
