"""Items with random latents and conditions, for `verify` and `plan`: no file is decoded and nothing is encoded."""

from collections.abc import Sequence

import numpy as np
import torch

from omnizoo.modalities.denoised import DenoisedItem
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.models.diffusion.samples import SampleSizes

MAX_FRAMES = 3  # maximum number of patches per axis in a small copy
MAX_SIDE = 4


class SimulatedItem(DenoisedItem):
    """Measures items like another module, and replaces them by random numbers that depend only on their row.

    Args:
        item: The module of the run.
        sizes: Sizes of samples.
        is_small: Whether latents have only a few patches. Their shape still depends on that of the item.
    """

    def __init__(self, item: DenoisedItem, sizes: SampleSizes, is_small: bool) -> None:
        super().__init__(item.geometry, item.shapes)
        self.item = item
        self.sizes = sizes
        self.is_small = is_small
        self.item_options = item.item_options  # type: ignore[misc]  # of the instance

    def measure(self, media: Media) -> MediaSize:
        size = self.item.measure(media)
        shape = tuple(map(int, size.shape))
        if not self.is_small:
            return size
        return self.size_of(self._small_shape(shape), cost=1.0)

    def prepare(self, media: Media) -> Inputs:
        if not self.is_small:  # a dry run needs no values
            return {}
        shape = tuple(map(int, self.measure(media).shape))
        random = np.random.Generator(np.random.PCG64(media.seed))

        def normal(size: Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(random.standard_normal(tuple(size), dtype=np.float32))

        conditions = self.sizes.condition_shapes(shape, self.sizes.text_tokens(""))
        return {"latents": normal(shape), **{name: normal(size) for name, size in conditions.items()}}

    def _small_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with a few patches per axis, which differs between most shapes."""
        channels, *sides = shape
        limits = (MAX_FRAMES, MAX_SIDE, MAX_SIDE)[-len(sides) :]
        patches = self.sizes.patch[-len(sides) :]
        small = []
        for side, patch, limit in zip(sides, patches, limits, strict=True):
            num_patches = max(1, side // patch)
            small.append(patch * (num_patches if num_patches <= limit else 2 + num_patches % (limit - 1)))
        return (channels, *small)
