"""Facts that the recipes of several diffusion transformers share: shapes of conditions, patches, position ids."""

from collections.abc import Callable
from typing import Any

import torch

from omnizoo.models.diffusion.recipe import CHANNELS, Condition, Config, ForwardShapes, Grid, Shape


def text(argument: str, width: str) -> Condition:
    """Return the condition of text embeddings, whose width is the config field `width`."""
    return Condition(argument, lambda config, latents, tokens: (tokens, config[width]))


def vector(argument: str, width: str) -> Condition:
    """Return the condition of one vector per sample, whose width is the config field `width`."""
    return Condition(argument, lambda config, latents, tokens: (config[width],) if config.get(width) else None)


def guidance(argument: str = "guidance", scale: float = 1.0) -> Condition:
    """Return the condition of a guidance number, for models that are distilled with one."""
    return Condition(argument, lambda config, latents, tokens: () if config.get("guidance_embeds") else None, scale)


def _reference_shape(config: Config, latents: Shape, tokens: int) -> Shape | None:
    added = config["in_channels"] - (config.get("out_channels") or config["in_channels"])
    return (added, *latents[1:]) if added else None


# Latents of conditioning media, for models with more input channels than output channels.
REFERENCE_CHANNELS = Condition(CHANNELS, _reference_shape)


def cubes(field: str) -> Callable[[Config], Grid]:
    """Return a function that reads a patch of three sizes from the config."""

    def patch(config: Config) -> Grid:
        frames, height, width = config[field]
        return frames, height, width

    return patch


def squares(field: str = "patch_size", frames: str = "") -> Callable[[Config], Grid]:
    """Return a function that reads the side of a patch, and its number of frames if it has a field, from the config."""

    def patch(config: Config) -> Grid:
        side = config[field]
        return (config.get(frames) or 1) if frames else 1, side, side

    return patch


def fixed(*sizes: int) -> Callable[[Config], Grid]:
    """Return a function that returns a patch that no config field contains."""
    frames, height, width = sizes
    return lambda config: (frames, height, width)


def output_channels(config: Config) -> int:
    """Return the channels of the noisy latents of a model that takes a grid."""
    return int(config.get("out_channels") or config["in_channels"])


def position_ids(shapes: ForwardShapes) -> dict[str, Any]:
    """Return the ids of tokens as (0, row, column), and zeros for text."""
    _, height, width = shapes.grid
    rows = torch.arange(height, device=shapes.device)
    columns = torch.arange(width, device=shapes.device)
    ids = torch.stack([rows.new_zeros(height, width), *torch.meshgrid(rows, columns, indexing="ij")], -1)
    zeros = torch.zeros(shapes.text_tokens, 3, device=shapes.device)
    return {"img_ids": ids.flatten(0, 1).float(), "txt_ids": zeros}
