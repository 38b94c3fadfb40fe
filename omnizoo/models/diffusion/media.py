"""The media of a diffusion transformer: what it learns to generate, as fields of rows."""

from collections.abc import Sequence

from omnizoo.modalities.denoised import LATENTS
from omnizoo.modalities.item import Port
from omnizoo.models.diffusion.recipe import DiffusionRecipe
from omnizoo.models.media.media_model import MediaModel, MediaModule


class DenoiserMedia(MediaModel):
    """The media of a diffusion transformer. All items are encoded before the model runs, on balanced ranks."""

    def __init__(self, recipe: DiffusionRecipe) -> None:
        self.names = (*recipe.media, LATENTS)

    @property
    def media_modules(self) -> Sequence[MediaModule]:
        return [MediaModule(name, "decoder", module="") for name in self.names]

    @property
    def ports_by_call(self) -> list[list[Port]]:
        return [self.ports]  # items of all kinds are encoded together
