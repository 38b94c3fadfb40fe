"""Sizes of the samples of a diffusion transformer, from configs alone: latents, text and conditions.

Loader workers and the step plan use them, so nothing here has weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.diffusion.conditioning.text_sizes import TextSizes
from omnizoo.models.diffusion.denoiser import (
    condition_shapes,
    latent_channels,
    latent_tokens,
    read_denoiser,
)
from omnizoo.models.diffusion.pipeline_folder import Component, PipelineFolder, is_pipeline_folder
from omnizoo.models.diffusion.recipe import DiffusionRecipe, diffusion_recipe_of

GUIDANCE = "guidance"  # condition that is a number, the same for all samples of a run
DUMMY_PATCHES = 4  # patches per side of the latents of a dummy sample
SMALL_TEXT_TOKENS = 12


def pipeline_of(model: ModelSection) -> PipelineFolder:
    """Return the pipeline folder of a diffusion transformer: `model.pipeline`, `model.path` or `model.config`.

    Raises:
        UserError: If none of them is a pipeline folder.
    """
    for key in ("pipeline", "path", "config"):
        source = getattr(model, key)
        if isinstance(source, str) and (key == "pipeline" or is_pipeline_folder(local_path(source))):
            return PipelineFolder.read(local_path(source), f"model.{key}")
    raise UserError(
        "model.pipeline: not set, but a diffusion transformer needs the scheduler and the encoders of a pipeline. Set "
        "it to a pipeline folder of diffusers."
    )


class LatentShapes:
    """Computes the shape of latents by running the autoencoder on the meta device."""

    def __init__(self, component: Component) -> None:
        with torch.device("meta"):
            self.vae = component.load_class().from_config(dict(component.config))
        self.has_frames = any(isinstance(module, nn.Conv3d) for module in self.vae.encoder.modules())
        batch_norm = getattr(self.vae, "bn", None)
        self.patch = 1  # side of the patches that normalization turns to channels
        if batch_norm is not None:
            self.patch = math.isqrt(batch_norm.num_features // self.vae.config.latent_channels)

    @torch.no_grad()
    def of(self, frames: int | None, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of the normalized latents of an item. Raises `ValueError` if its sides do not divide."""
        if frames is not None and frames > 1 and not self.has_frames:
            raise ValueError("the autoencoder of the model encodes single frames. Remove the number of frames.")
        size = (frames or 1, height, width) if self.has_frames else (height, width)
        encoded = self.vae.encode(torch.empty(1, 3, *size, device="meta"))
        distribution = getattr(encoded, "latent_dist", None)
        latents = encoded.latent if distribution is None else distribution.mean
        shape = tuple(latents.shape[1:])
        for name, side, latent_side in (("height", height, shape[-2]), ("width", width, shape[-1])):
            factor = self.patch * round(side / latent_side)
            if side % factor:
                raise ValueError(f"{name} {side} is not a multiple of {factor}")
        return patched(shape, self.patch)


def patched(shape: Sequence[int], patch: int) -> tuple[int, ...]:
    """Return the shape of latents after patches of `patch` x `patch` values have become channels."""
    channels, *frames, height, width = shape
    return (channels * patch**2, *frames, height // patch, width // patch)


@dataclass(frozen=True)
class SampleSizes:
    """The sizes of samples of one model. Picklable, and without weights.

    Attributes:
        config: The config of the transformer, with `_class_name`.
        fixed_text_tokens: Number of text tokens of every prompt; None if it depends on the prompt.
        text_sizes: Counts the text tokens of a prompt; None if their number is fixed.
        latent_patch: Side of the patches of latents that normalization turns to channels.
        shapes: For each shape of items in pixels (frames, height, width), the shape of their normalized latents.
    """

    config: Mapping[str, Any]
    fixed_text_tokens: int | None = None
    text_sizes: TextSizes | None = None
    latent_patch: int = 1
    shapes: Mapping[tuple[int | None, int, int], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSection) -> "SampleSizes":
        """Return the sizes of latents and conditions for the section `model` of a config."""
        return cls(read_denoiser(spec).config)

    def for_rows(
        self, folder: PipelineFolder, shapes: Sequence[tuple[int | None, int, int]], max_text_tokens: int | None
    ) -> "SampleSizes":
        """Return the sizes that rows need: those of prompts, and of items in pixels.

        Args:
            folder: The pipeline.
            shapes: Shapes of items in pixels: frames, height and width.
            max_text_tokens: Maximum number of text tokens; None for that of the pipeline.

        Raises:
            UserError: If the autoencoder does not support a shape.
        """
        text_sizes = TextSizes(folder, max_text_tokens)
        latent_shapes = LatentShapes(folder.component("vae"))
        known = {}
        for frames, height, width in shapes:
            try:
                known[frames, height, width] = latent_shapes.of(frames, height, width)
            except ValueError as error:
                size = f"{height}x{width}" if frames is None else f"{height}x{width}x{frames}"
                raise UserError(f"data.shapes: {size}: {error}") from error
            self.latent_tokens(known[frames, height, width])  # raises if the latents do not divide into patches
        return replace(
            self,
            fixed_text_tokens=None if self.recipe.trims_text else text_sizes("").tokens,
            text_sizes=text_sizes if self.recipe.trims_text else None,
            latent_patch=latent_shapes.patch,
            shapes=known,
        )

    @property
    def media(self) -> tuple[str, ...]:
        """Names of the fields of rows with items that the model generates."""
        return self.recipe.media

    @property
    def recipe(self) -> DiffusionRecipe:
        """The facts about the family of the model."""
        return diffusion_recipe_of(str(self.config["_class_name"]))

    @property
    def takes_guidance(self) -> bool:
        """Whether the model receives a guidance scale."""
        return GUIDANCE in condition_shapes(self.config, self.dummy_shape[:-1], 1)

    def latent_shape(self, frames: int | None, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of the normalized latents of an item in one of the shapes of the run."""
        return self.shapes[frames, height, width]

    def normalized_shape(self, latent_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of latents after normalization."""
        return patched(latent_shape, self.latent_patch)

    def latent_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of tokens of the transformer for latents of this shape."""
        return latent_tokens(self.config, latent_shape)

    def text_tokens(self, prompt: str) -> int:
        """Return the number of text tokens that the transformer receives for a prompt."""
        if self.fixed_text_tokens is not None:
            return self.fixed_text_tokens
        assert self.text_sizes is not None, "`for_rows` sets one of them"
        return self.text_sizes(prompt).unmasked_tokens

    def condition_shapes(self, latent_shape: Sequence[int], text_tokens: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each condition of a sample, keyed by name. The guidance scale is not one of them."""
        shapes = condition_shapes(self.config, latent_shape, text_tokens)
        return {name: shape for name, shape in shapes.items() if name != GUIDANCE}

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents that become one token."""
        return self.recipe.patch(self.config)

    @property
    def small_text_tokens(self) -> int:
        """Number of text tokens of dummy samples and small copies. Some models need their published number."""
        return self.recipe.fixed_text_tokens(self.config) or SMALL_TEXT_TOKENS

    @property
    def dummy_shape(self) -> tuple[int, ...]:
        """The batch shape of a dummy sample: latents, and text tokens."""
        frames, height, width = self.patch
        sides = (frames, DUMMY_PATCHES * height, DUMMY_PATCHES * width)
        return (latent_channels(self.config), *sides, self.small_text_tokens)

    def zero_sample(self, batch_shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return an encoded sample of zeros with a batch shape: latents, and text tokens."""
        *latent_shape, text_tokens = batch_shape
        shapes = self.condition_shapes(latent_shape, text_tokens)
        return {"latents": torch.zeros(latent_shape), **{name: torch.zeros(shape) for name, shape in shapes.items()}}
