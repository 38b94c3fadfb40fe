"""Base classes of image encoders: tiles of one size (`TileTower`), or patches of images of any shape (`PatchTower`)."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import ImageTowerEncoder

MOST_TILES = 4  # tiles per part: larger images are split, so that several ranks can encode them


class TileTower(ImageTowerEncoder):
    """Encoder for square tiles of `edge` pixels. A tile has `patches` patches and `each` placeholder tokens."""

    def __init__(
        self, model: PreTrainedModel, tower: str, projector: str, processor: Any, edge: int, patches: int, each: int
    ) -> None:
        super().__init__(model, tower, projector)
        self.processor, self.edge, self.patches, self.each = processor, edge, patches, each

    def tiles(self, height: int, width: int) -> int:
        """Return the number of tiles of an image of this size."""
        return 1

    def layout(self, tiles: int) -> tuple[str | int, ...]:
        """Return `MediaSize.layout` of an image with `tiles` tiles, as the model's own processor writes it."""
        return ()

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode `[tiles, channels, edge, edge]` to features `[tiles, each, width]`."""
        features: torch.Tensor = self.model.get_image_features(pixels, return_dict=True).pooler_output
        return features

    def measure(self, media: Media) -> MediaSize:
        tiles = self.tiles(*image_size(media))
        return self.size_of(tiles, self.layout(tiles))

    def size_of(self, tiles: int, layout: tuple[Any, ...]) -> MediaSize:
        return MediaSize(tiles * self.each, tiles * self.cost, layout=layout)

    @cached_property
    def cost(self) -> float:
        """FLOPs of one tile."""
        return self.flops(self.patches, self.each)

    def prepare(self, media: Media) -> Inputs:
        out = self.processor(images=read_image(media), return_tensors="pt")
        return {"pixels": out["pixel_values"].flatten(0, -4)}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        pieces = inputs["pixels"].split(MOST_TILES)
        if len(pieces) == 1:
            return [(size, inputs)]
        # Clone the pieces: a view would be sent with its whole storage.
        return [(self.size_of(len(piece), size.layout), {"pixels": piece.clone()}) for piece in pieces]

    def dummy_input(self) -> Inputs:
        return {"pixels": torch.zeros(1, 3, self.edge, self.edge)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return len(inputs["pixels"]) * self.each

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        return self.features(torch.cat([item["pixels"] for item in items])).flatten(0, 1)


class PatchTower(ImageTowerEncoder):
    """Encoder for images of any shape: all items form one sequence of patches, with attention within each item."""

    packs_items = True

    def size_of(self, patches: int, places: int, layout: tuple[str | int, ...]) -> MediaSize:
        return MediaSize(places, self.flops(patches, places), layout=layout)
