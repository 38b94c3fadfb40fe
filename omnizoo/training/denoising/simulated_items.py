"""Items with random latents and conditions, for `verify` and `plan`: no file is decoded and nothing is encoded."""

from collections.abc import Sequence

import numpy as np
import torch

from omnizoo.modalities.denoised import DenoisedItem
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.models.diffusion.samples import SampleSizes

MAX_FRAMES = 3  # maximum number of patches along the frames in a small copy
MIN_SIDE = 3  # minimum number of patches of a side; one more is possible


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
        """Return a shape with a few patches per axis, which differs between most shapes.

        A frame has at least 9 patches, so that each of up to 8 ranks has a token.
        """
        channels, *sides = shape
        patches = self.sizes.patch[-len(sides) :]
        counts = [side // patch for side, patch in zip(sides, patches, strict=True)]
        small = [min(count, MAX_FRAMES) for count in counts[:-2]] + [MIN_SIDE + count % 2 for count in counts[-2:]]
        return (channels, *(max(1, count) * patch for count, patch in zip(small, patches, strict=True)))
