"""Recipes of diffusion transformers: the facts about a family that its diffusers code and config do not contain.

A family's file (`recipes/<class name in snake case>.py`) contains one `RECIPE`. A class without a recipe is refused,
because its conventions (direction of time, scale, sign) cannot be read from its code.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError

DENOISER = "_omnizoo_denoiser"  # attribute of a model that stores its recipe
COMPRESSION = "_omnizoo_compression"  # attribute of a transformer that stores the pixels per latent
CHANNELS = "channels"  # in `Condition.argument`: concatenated with the noisy latents along the channels
LATENTS = "latents"  # stream of tokens of the noisy latents
TEXT = "text"  # stream of text tokens

Config = Mapping[str, Any]
Shape = tuple[int, ...]
Grid = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True)
class Condition:
    """An input of the transformer besides the noisy latents and the noise share."""

    argument: str  # keyword argument of its forward, or `CHANNELS`
    # (config, shape of the latents [C, F, H, W], number of text tokens) -> shape of one sample; None if the model does
    # not have this input.
    shape: Callable[[Config, Shape, int], Shape | None]
    scale: float = 1.0  # factor between the published value and the argument


@dataclass(frozen=True)
class ForwardShapes:
    """Sizes of a batch, for arguments that depend only on them."""

    config: Config
    grid: Grid  # tokens per axis
    text_tokens: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    compression: Grid | None = None  # pixels per latent of the pipeline's autoencoder; None if unknown


@dataclass(frozen=True)
class Cut:
    """A tensor that is cut into one slice per rank."""

    stream: str
    dim: int = 1


@dataclass(frozen=True)
class Split:
    """The places where the tokens of a transformer are cut and made whole again under sequence parallelism.

    Module names are patterns. A pattern may match modules that only some models of the family have.
    """

    inputs: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)  # module -> cuts, by name of the argument
    outputs: Mapping[str, Sequence[Cut]] = field(default_factory=dict)  # module -> cuts of its outputs, in order
    gathered: str = "proj_out"  # modules whose output contains the tokens of the latents, to be made whole
    # Attention modules over the cut tokens -> streams that they attend over.
    attention: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joins_text: bool = False  # whether the stream of latents is followed by the text
    needs_text: bool = False  # whether the model's code fails if a rank holds no text token
    # Attention modules that need no communication: they run before the cut, or attend to tokens that are not cut.
    local_attention: tuple[str, ...] = ()

    @property
    def streams(self) -> set[str]:
        """The streams that are cut."""
        return {stream for streams in self.attention.values() for stream in streams}


@dataclass(frozen=True)
class DiffusionRecipe:
    """Properties of a family of diffusion transformers that its diffusers code and config do not contain."""

    about: str  # published models of the family
    media: tuple[str, ...]  # fields of rows with the media that the model generates
    blocks: tuple[str, ...]  # classes of the blocks to shard and recompute
    conditions: Mapping[str, Condition]
    small_config: Mapping[str, Any]  # config fields of a small copy; channels and widths of conditions are unchanged
    patch: Callable[[Config], Grid]  # size of a patch of latents, which becomes one token
    channels: Callable[[Config], int]  # channels of the noisy latents
    is_packed: bool = False  # whether the caller cuts the latents into patches; otherwise the model does
    dims: int = 3  # dims of the grid that an unpacked model expects: 3 for [F, H, W], 2 for [H, W]
    latents_argument: str = "hidden_states"
    takes_lists: bool = False  # whether latents and text are lists of samples, and the output as well
    frames_first: bool = False  # whether the model expects [B, F, C, H, W]
    time_argument: str = "timestep"
    time_scale: float = 1000.0  # factor of the noise share
    time_factor: str = ""  # config field with another factor of the noise share
    is_time_reversed: bool = False  # whether the model's time is 1 - noise share
    is_time_discrete: bool = False  # whether the scaled time is an integer
    output_sign: float = 1.0  # factor between the output and noise - data
    # Further arguments of forward, such as position ids.
    arguments: Callable[[ForwardShapes], dict[str, Any]] | None = None
    compression: Callable[[Config], Grid] | None = None  # config of the autoencoder -> pixels per latent, if needed
    unsupported: Mapping[str, str] = field(default_factory=dict)  # config field that must not be set -> reason
    trims_text: bool = False  # whether masked text tokens may be dropped; otherwise the published length is kept
    token_multiple: int = 1  # the model pads latents and text to a multiple of this number of tokens
    # Returns the number of text tokens that the code of the model requires; None for any number.
    fixed_text_tokens: Callable[[Config], int | None] = lambda config: None
    attends_text: bool = True  # whether attention over the latents includes the text tokens
    heads: str = "num_attention_heads"  # config field with the number of attention heads
    split: Split | None = None  # None: sequence parallelism is not supported

    def grid(self, config: Config, shape: Sequence[int]) -> Grid:
        """Return the tokens per axis of latents `[..., F, H, W]` or `[..., H, W]`. `shape` starts with the channels."""
        frames, height, width = (1, *shape[1:])[-3:]
        sizes = (frames, height, width)
        patch = self.patch(config)
        for size, step in zip(sizes, patch, strict=True):
            if size % step:
                raise UserError(
                    f"data.shapes: latents of {'x'.join(map(str, sizes))} (frames x height x width) cannot be cut into "
                    f"patches of {'x'.join(map(str, patch))}. Choose sizes that are multiples."
                )
        return frames // patch[0], height // patch[1], width // patch[2]

    def padded(self, tokens: int) -> int:
        """Return the number of tokens of latents or text in the model."""
        return -(-tokens // self.token_multiple) * self.token_multiple


def snake_case(class_name: str) -> str:
    """Return the name of the recipe file of a class: snake case without `Model`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z]|\dD)|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", class_name.removesuffix("Model"))
    return words.lower()


def diffusion_recipe_of(class_name: str, key: str = "model") -> DiffusionRecipe:
    """Return the recipe of a class of diffusers. Raise a `UserError` if the class has none."""
    name = f"omnizoo.recipes.{snake_case(class_name)}"
    recipe = None
    if class_name.isidentifier() and find_spec(name) is not None:
        recipe = getattr(import_module(name), "RECIPE", None)
    if not isinstance(recipe, DiffusionRecipe):
        raise UserError(
            f"{key}: {class_name} has no recipe, so its conventions are unknown. The classes with a recipe are "
            f"{', '.join(recipe_files())} (names of files in omnizoo/recipes)."
        )
    return recipe


def recipe_files() -> list[str]:
    """Return the names of the recipe files of diffusion transformers."""
    spec = find_spec("omnizoo.recipes")
    assert spec is not None
    assert spec.origin is not None
    return sorted(file.stem for file in Path(spec.origin).parent.glob("*transformer_?d.py"))


def denoiser_recipe(model: nn.Module) -> DiffusionRecipe | None:
    """Return the recipe of a diffusion transformer, also if it is sharded; None for any other model."""
    recipe = vars(model).get(DENOISER)
    assert recipe is None or isinstance(recipe, DiffusionRecipe)
    return recipe


def parts_in_fp32(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the authors of a diffusion transformer keep in fp32, keyed by name."""
    kept = {}
    for prefix, module in model.named_modules():
        parts = set(getattr(module, "_keep_in_fp32_modules", None) or ())
        if denoiser_recipe(module) is None or not parts:
            continue
        for name, parameter in module.named_parameters(prefix):
            if parts.intersection(name.split(".")):
                kept[name] = parameter
    return kept
