"""Frozen tokenizers that convert images to a fixed grid of codebook indices.

The VQ models of transformers and diffusers are supported. For small images, k-means fits a codebook of patches in
seconds.
"""

import inspect
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.pixels import Array, PixelScale, from_patches, to_patches
from omnizoo.modalities.frozen_tokenizer import Diffusers, Frozen

Grid = tuple[int, int]


class Tokenizer(Frozen):
    """Base class of tokenizers that convert between images of a fixed `size` and a `grid` of codes."""

    config: PreTrainedConfig | dict[str, Any]
    size: Grid  # (height, width) of the images in pixels
    grid: Grid  # (height, width) of the grid of codes
    codes: int  # number of codes in the codebook
    channels: int  # channels of the images

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Convert bytes `[C, H, W]` to indices `[grid]`."""
        raise NotImplementedError

    def decode(self, codes: torch.Tensor) -> Array:
        """Convert indices `[grid]` to bytes `[H, W, C]`."""
        raise NotImplementedError


class HFTokenizer(Tokenizer):
    """A VQ model of transformers. It must have `encode`. To generate images, it must also have `decode`."""

    def __init__(self, config: PreTrainedConfig, folder: str | None, size: int | Sequence[int] | None) -> None:
        super().__init__(_vq_class(config)(config))
        self.config = config
        self.scale = PixelScale.of(folder)
        factor = 2 ** (len(config.channel_multiplier) - 1)
        patches = getattr(config, "num_patches", None)  # along one side; such a model decodes only this grid
        if size is None:
            size = patches * factor if patches else getattr(config, "resolution", None)
        self.size, self.grid = _sizes(size, factor)
        if patches and self.grid != (patches, patches):
            raise UserError(
                f"decoder.size: {size} does not match num_patches of the tokenizer, which requires {patches * factor}"
            )
        self.codes = self.model.quantize.embedding.num_embeddings
        self.channels = config.in_channels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        values = self.scale.values(pixels, self.like)[None]
        takes_sizes = "image_sizes" in inspect.signature(self.model.encode).parameters
        sizes = {"image_sizes": torch.tensor([self.size])} if takes_sizes else {}
        codes = self.model.encode(values, **sizes).image_tokens  # a list of grids if sizes are passed, otherwise flat
        grid: torch.Tensor = codes[0] if takes_sizes else codes.view(self.grid)
        return grid

    def decode(self, codes: torch.Tensor) -> Array:
        if not hasattr(self.model, "decode"):
            raise UserError(
                f"decoder: {type(self.model).__name__} of transformers has no `decode`. "
                "Training works, but generated images cannot be rendered."
            )
        fixed_grid = hasattr(self.config, "num_patches")
        batch = codes.view(1, -1) if fixed_grid else codes[None]
        return self.scale.pixels(self.model.decode(batch)[0])


def _vq_class(config: PreTrainedConfig) -> Any:
    """Return the model class of `config`.

    The Auto classes of transformers omit VQ models, so the class is looked up in the module next to its config.
    """
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for candidate in vars(module).values():
        is_class = isinstance(candidate, type) and issubclass(candidate, PreTrainedModel)
        if not is_class or not hasattr(candidate, "encode"):
            continue
        if candidate.config_class is type(config) and hasattr(config, "channel_multiplier"):
            return candidate
    raise UserError(
        f"decoder.config: `{config.model_type}` is not a VQ model. "
        "If it contains one, save that with model.vqmodel.save_pretrained(folder)."
    )


class DiffusersTokenizer(Tokenizer, Diffusers):
    """`VQModel` of diffusers."""

    def __init__(self, config: dict[str, Any], folder: str | None, size: int | Sequence[int] | None) -> None:
        Diffusers.__init__(self, config, folder)
        if not hasattr(self.model, "quantize"):
            raise UserError(f"decoder.path: {config['_class_name']} is not a VQ model. Try kind: flow.")
        self.config = config
        self.scale = PixelScale()
        factor = 2 ** (len(config["block_out_channels"]) - 1)
        self.size, self.grid = _sizes(size or config.get("sample_size"), factor)
        self.codes = self.model.quantize.n_e
        self.channels = self.model.config.in_channels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        latents = self.model.encode(self.scale.values(pixels, self.like)[None]).latents
        _, _, (_, _, codes) = self.model.quantize(latents)
        grid: torch.Tensor = codes.view(self.grid)
        return grid

    def decode(self, codes: torch.Tensor) -> Array:
        shape = (1, *self.grid, self.model.quantize.vq_embed_dim)
        entries = codes.flatten()
        if not self.model.config.lookup_from_codebook:
            entries = self.model.quantize.get_codebook_entry(entries, shape)
        return self.scale.pixels(self.model.decode(entries, force_not_quantize=True, shape=shape).sample[0])


class PatchTokenizer(Tokenizer):
    """Maps each patch to the nearest entry of a codebook, by Euclidean distance.

    `fit_patch_codebook` and `save_patch_codebook` create its folder.
    """

    codebook: torch.Tensor

    def __init__(self, config: dict[str, Any], folder: str | None, size: int | Sequence[int] | None) -> None:
        super().__init__(nn.Identity())
        self.config = config
        self.folder = folder
        self.patch = config["patch"]
        self.codes = config["codes"]
        self.channels = config["channels"]
        self.size, self.grid = _sizes(size or config["size"], self.patch)
        self.register_buffer("codebook", torch.empty(self.codes, self.patch**2 * self.channels))
        nn.init.uniform_(self.codebook)
        if not self.codebook.is_meta:
            self.load_state_dict(self.stored(), strict=False)

    def stored(self) -> dict[str, torch.Tensor]:
        if self.folder is None:
            return {}
        try:
            stored = load_file(Path(self.folder) / "codebook.safetensors")["codebook"]
        except (OSError, SafetensorError) as error:
            raise UserError(f"decoder.path: {self.folder}: no codebook found: {error}") from error
        return {"codebook": torch.from_numpy(stored)}

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = to_patches((pixels.to(self.codebook) / 255).movedim(0, -1), self.patch)
        distances = torch.cdist(patches, self.codebook, compute_mode="donot_use_mm_for_euclid_dist")
        return distances.argmin(-1).view(self.grid)

    def decode(self, codes: torch.Tensor) -> Array:
        pixels = from_patches(self.codebook[codes.flatten()], self.grid, self.patch)
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def _sizes(size: int | Sequence[int] | None, factor: int) -> tuple[Grid, Grid]:
    """Return the (height, width) of the images and of the grid of codes."""
    if size is None:
        raise UserError("decoder.size: not set, and the tokenizer accepts any size. Set height and width.")
    height, width = (size, size) if isinstance(size, int) else size
    if height % factor or width % factor or height * width == 0:
        raise UserError(f"decoder.size: {size} is not a multiple of {factor} in height and width")
    return (height, width), (height // factor, width // factor)


def fit_patch_codebook(images: Sequence[Array], patch: int, codes: int, seed: int) -> Array:
    """Fit a codebook with k-means over all patches of the images.

    Args:
        images: Bytes `[H, W]` or `[H, W, C]`.
        patch: Side of a patch in pixels.
        codes: Number of entries of the codebook.
        seed: Seed of the initial centers.

    Returns:
        The codebook `[codes, patch * patch * C]`, with values in 0..1.

    Raises:
        UserError: If the images have fewer than `codes` different patches.
    """
    pixels = [torch.from_numpy(np.atleast_3d(np.array(image, np.uint8))) for image in images]
    patches = torch.cat([to_patches(image, patch) for image in pixels]).numpy()
    points, counts = np.unique(patches, axis=0, return_counts=True)  # most patches of small images occur often
    if len(points) < codes:
        raise UserError(
            f"codes: {codes} is more than the {len(points)} different patches of the images. Use fewer codes."
        )
    points = points / 255
    centers = _initial_centers(points, counts, codes, seed)
    while True:
        nearest = _nearest_centers(points, centers)
        weights = np.bincount(nearest, counts, minlength=codes)
        sums = np.stack([np.bincount(nearest, counts * column, minlength=codes) for column in points.T], 1)
        means = sums / np.maximum(weights, 1)[:, None]
        new_centers = np.where(weights[:, None] > 0, means, centers)
        if np.abs(new_centers - centers).max() < 1e-4:
            return new_centers.astype(np.float32)
        centers = new_centers


def _initial_centers(points: Array, counts: Array, num_centers: int, seed: int) -> Array:
    """Sample centers with k-means++. It prefers points that are far from all centers chosen so far.

    Args:
        points: Distinct patches `[N, values]`.
        counts: Number of occurrences of each patch.
        num_centers: Number of centers.
        seed: Seed of the random generator.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    centers = points[random.choice(len(points), 1, p=counts / counts.sum())]
    distance = ((points - centers) ** 2).sum(1)
    while len(centers) < num_centers:
        odds = counts * distance
        center = points[random.choice(len(points), 1, p=odds / odds.sum())]
        centers = np.append(centers, center, axis=0)
        distance = np.minimum(distance, ((points - centers[-1]) ** 2).sum(1))
    return centers


def _nearest_centers(points: Array, centers: Array) -> Array:
    """Return the index of the nearest center of each point. Points are processed in chunks to limit memory."""
    nearest = []
    for chunk in np.array_split(points, len(points) // 512 + 1):
        distances = ((chunk[:, None] - centers) ** 2).sum(2)
        nearest.append(distances.argmin(1))
    return np.concatenate(nearest)


def save_patch_codebook(folder: str | Path, codebook: Array, patch: int, size: int | Sequence[int]) -> None:
    """Write a folder that can be used as the `path` of an `image_tokens` decoder.

    Args:
        folder: The folder to write. It is created if it does not exist.
        codebook: The codebook, from `fit_patch_codebook`.
        patch: Side of a patch in pixels.
        size: Height and width of the images in pixels, or one number for square images.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    channels = codebook.shape[1] // patch**2
    config = {"patch": patch, "size": size, "channels": channels, "codes": len(codebook)}
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"codebook": codebook}, Path(folder) / "codebook.safetensors")
