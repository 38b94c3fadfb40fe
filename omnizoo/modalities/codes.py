"""Pictures as codes: a frozen tokeniser makes a fixed grid of codebook indices, predicted in raster order.

Tokenisers: the VQ models of Hugging Face and of diffusers, and a codebook of patches (k-means, fitted in seconds) for
small pictures.
"""

import inspect
import json
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, Inputs, Sampling, Size
from omnizoo.modalities.files import PICTURE_OPTIONS, picture_size
from omnizoo.modalities.frozen import Diffusers, Frozen, forward_flops, read_settings
from omnizoo.modalities.item import Media
from omnizoo.modalities.pixels import Array, PixelScale, from_patches, picture_html, read_pixels, to_patches, to_picture
from omnizoo.ops.linear_cross_entropy import CHUNK, LinearHead, linear_cross_entropy_sum
from omnizoo.ops.log_probability import by_rows, log_probabilities

Grid = tuple[int, int]


class ImageCodes(Decoder):
    """A target is (code, place in the grid): `embed` needs the place, which no neighbour tells it.

    `config` or `folder` say which tokeniser: a HF VQ model saved alone (`model.vqmodel.save_pretrained(...)`), a VQ
    model of diffusers, or what `save_patch_codebook` wrote. `size` is height and width of all pictures.
    """

    item_options = PICTURE_OPTIONS

    def __init__(
        self,
        width: int,
        config: PreTrainedConfig | dict[str, Any] | None = None,
        folder: str | None = None,
        size: int | Sequence[int] | None = None,
        head: str = "linear",
    ) -> None:
        super().__init__()
        self.tokenizer = _tokenizer(config, folder, size)
        height, self.columns = self.tokenizer.grid
        self.places = height * self.columns
        self.codes = nn.Embedding(self.tokenizer.codes, width)
        self.row = nn.Embedding(height, width)
        self.column = nn.Embedding(self.columns, width)
        if head not in ("linear", "mlp"):
            raise UserError(f"decoder.head: `{head}` is neither `linear` nor `mlp`")
        last = nn.Linear(width, self.tokenizer.codes)
        self.head = last if head == "linear" else nn.Sequential(nn.Linear(width, width), nn.GELU(), last)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.codes, self.row, self.column):  # the scale of a language model's own embeddings
            nn.init.normal_(table.weight, std=0.02)

    @property
    def config(self) -> PreTrainedConfig | dict[str, Any]:
        """Of the tokeniser: with it instead of the folder, the same decoder can be built again."""
        return self.tokenizer.config

    @property
    def pretrained(self) -> PreTrainedModel | None:
        return self.tokenizer.model if isinstance(self.tokenizer, HFTokenizer) else None

    def measure(self, media: Media) -> Size:
        picture_size(media)
        return Size(self.places, cost=self._work)

    @cached_property
    def _work(self) -> float:
        return forward_flops(self.tokenizer, self.blank()["pixels"])

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": read_pixels(media, self.tokenizer.size, self.tokenizer.channels)}

    def blank(self) -> Inputs:
        return {"pixels": torch.zeros(self.tokenizer.channels, *self.tokenizer.size, dtype=torch.uint8)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        codes = torch.stack([self.tokenizer.encode(item["pixels"]).flatten() for item in items])
        places = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
        return torch.stack([codes, places], -1).flatten(0, 1)

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        code, place = targets.unbind(-1)
        embedded: torch.Tensor = self.codes(code) + self.row(place // self.columns) + self.column(place % self.columns)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        *before, last = self.head if isinstance(self.head, nn.Sequential) else [self.head]
        for layer in before:
            hidden = layer(hidden)
        if type(last) is nn.Linear and len(hidden) * last.out_features > CHUNK:
            return linear_cross_entropy_sum(hidden, LinearHead(last.weight, last.bias), targets[:, 0])
        return code_loss(last(hidden), targets[:, 0])

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def work(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return log_probabilities(self.head(some), wanted[:, 0])

        each = by_rows(work, hidden, targets, max(1, CHUNK // self.tokenizer.codes))
        return each, torch.ones_like(each)

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        if len(targets) == self.places:
            return None
        code = sampling.draw(self.head(hidden[None]))
        return torch.cat([code, code.new_tensor([len(targets)])])

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        return to_picture(self.tokenizer.decode(targets[:, 0].view(self.tokenizer.grid)))

    def save(self, item: Any, stem: str) -> str:
        item.save(f"{stem}.png")
        return f"{stem}.png"

    def preview(self, media: Media) -> str:
        return picture_html(media, self.tokenizer.channels)


def code_loss(logits: torch.Tensor, codes: torch.Tensor, ignore: int = -100) -> torch.Tensor:
    """Sum of cross entropies in fp32 or better; `ignore` carries none. 0 (with a graph) for no targets."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, codes, reduction="sum", ignore_index=ignore)


class Tokenizer(Frozen):
    """Pictures of one `size` <-> a `grid` of `codes`."""

    config: PreTrainedConfig | dict[str, Any]
    size: Grid
    grid: Grid
    codes: int
    channels: int

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Bytes `[C, H, W]` -> indices `[grid]`."""
        raise NotImplementedError

    def decode(self, codes: torch.Tensor) -> Array:
        """Indices `[grid]` -> bytes `[H, W, C]`."""
        raise NotImplementedError


def _tokenizer(
    config: PreTrainedConfig | dict[str, Any] | None, folder: str | None, size: int | Sequence[int] | None
) -> Tokenizer:
    weights = folder if config is None else None  # those of a config come from elsewhere
    if config is None:
        config = read_settings(folder)
    if isinstance(config, dict) and "model_type" in config:
        config = AutoConfig.for_model(**config)
    if isinstance(config, PreTrainedConfig):
        return HFTokenizer(config, folder, size)
    if "_class_name" in config:
        return DiffusersTokenizer(config, weights, size)
    if "patch" in config:
        return PatchTokenizer(config, weights, size)
    raise UserError(
        f"decoder.path: {folder} is not the folder of a tokeniser of Hugging Face or diffusers, or of a patch codebook"
    )


class HFTokenizer(Tokenizer):
    """A VQ model of transformers with `encode` and, for pictures to be made of its codes, `decode`."""

    def __init__(self, config: PreTrainedConfig, folder: str | None, size: int | Sequence[int] | None) -> None:
        super().__init__(_vq_class(config)(config))
        self.config, self.scale = config, PixelScale.of(folder)
        factor = 2 ** (len(config.channel_multiplier) - 1)
        patches = getattr(config, "num_patches", None)  # of one side: such a model decodes this grid only
        if size is None:
            size = patches * factor if patches else getattr(config, "resolution", None)
        self.size, self.grid = _sizes(size, factor)
        if patches and self.grid != (patches, patches):
            raise UserError(f"decoder.size: {size}: the tokeniser's num_patches fix it to {patches * factor}")
        self.codes, self.channels = self.model.quantize.embedding.num_embeddings, config.in_channels

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        values = self.scale.values(pixels, self.like)[None]
        takes_sizes = "image_sizes" in inspect.signature(self.model.encode).parameters
        sizes = {"image_sizes": torch.tensor([self.size])} if takes_sizes else {}
        codes = self.model.encode(values, **sizes).image_tokens  # with sizes: a list of grids, else one flat tensor
        grid: torch.Tensor = codes[0] if takes_sizes else codes.view(self.grid)
        return grid

    def decode(self, codes: torch.Tensor) -> Array:
        if not hasattr(self.model, "decode"):
            raise UserError(
                f"decoder: {type(self.model).__name__} of this transformers has no `decode`: it can be trained on, but "
                "its pictures cannot be shown"
            )
        fixed_grid = hasattr(self.config, "num_patches")
        return self.scale.pixels(self.model.decode(codes.view(1, -1) if fixed_grid else codes[None])[0])


def _vq_class(config: PreTrainedConfig) -> Any:
    """The model of `config`: transformers' Auto classes leave out VQ models, so it is looked up beside its config."""
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for found in vars(module).values():
        is_model = isinstance(found, type) and issubclass(found, PreTrainedModel) and hasattr(found, "encode")
        if is_model and found.config_class is type(config) and hasattr(config, "channel_multiplier"):
            return found
    raise UserError(
        f"decoder.config: `{config.model_type}` is not a VQ model; one that is part of another model is saved alone by "
        "`model.vqmodel.save_pretrained(folder)`"
    )


class DiffusersTokenizer(Tokenizer, Diffusers):
    """`VQModel` of diffusers."""

    def __init__(self, config: dict[str, Any], folder: str | None, size: int | Sequence[int] | None) -> None:
        Diffusers.__init__(self, config, folder)
        if not hasattr(self.model, "quantize"):
            raise UserError(f"decoder.path: {config['_class_name']} of diffusers is not a VQ model; `flow` may take it")
        self.config, self.scale = config, PixelScale()
        self.size, self.grid = _sizes(size or config.get("sample_size"), 2 ** (len(config["block_out_channels"]) - 1))
        self.codes, self.channels = self.model.quantize.n_e, self.model.config.in_channels

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
    """The nearest patch of a codebook, by squared distance. Made by `fit_patch_codebook` and `save_patch_codebook`."""

    codebook: torch.Tensor

    def __init__(self, config: dict[str, Any], folder: str | None, size: int | Sequence[int] | None) -> None:
        super().__init__(nn.Identity())
        self.config, self.folder = config, folder
        self.patch, self.codes, self.channels = config["patch"], config["codes"], config["channels"]
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
            raise UserError(f"decoder.path: no codebook in {self.folder}: {error}") from error
        return {"codebook": torch.from_numpy(stored)}

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = to_patches((pixels.to(self.codebook) / 255).movedim(0, -1), self.patch)
        return (
            torch.cdist(patches, self.codebook, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1).view(self.grid)
        )

    def decode(self, codes: torch.Tensor) -> Array:
        pixels = from_patches(self.codebook[codes.flatten()], self.grid, self.patch)
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


def _sizes(size: int | Sequence[int] | None, factor: int) -> tuple[Grid, Grid]:
    """Height and width, and those of the grid of codes."""
    if size is None:
        raise UserError("decoder.size: the tokeniser takes pictures of any size: give the height and width of yours")
    height, width = (size, size) if isinstance(size, int) else size
    if height % factor or width % factor or height * width == 0:
        raise UserError(f"decoder.size: {size}: height and width must be multiples of {factor}")
    return (height, width), (height // factor, width // factor)


def fit_patch_codebook(images: Sequence[Array], patch: int, codes: int, seed: int) -> Array:
    """k-means over all patches of `images` (bytes, `[H, W]` or `[H, W, C]`): `[codes, patch * patch * C]`, in 0..1."""
    values = [torch.from_numpy(np.atleast_3d(np.array(image, np.uint8))) for image in images]
    patches = torch.cat([to_patches(value, patch) for value in values]).numpy()
    points, counts = np.unique(patches, axis=0, return_counts=True)  # most patches of small pictures come again
    if len(points) < codes:
        raise UserError(f"codes: {codes} are more than the {len(points)} different patches that the pictures have")
    points = points / 255
    random = np.random.Generator(np.random.PCG64(seed))
    centres = points[random.choice(len(points), 1, p=counts / counts.sum())]
    distance = ((points - centres) ** 2).sum(1)
    while len(centres) < codes:  # k-means++: the next centre is likely far from all there are
        odds = counts * distance
        centres = np.append(centres, points[random.choice(len(points), 1, p=odds / odds.sum())], axis=0)
        distance = np.minimum(distance, ((points - centres[-1]) ** 2).sum(1))
    while True:
        nearest = np.concatenate(
            [
                ((chunk[:, None] - centres) ** 2).sum(2).argmin(1)
                for chunk in np.array_split(points, len(points) // 512 + 1)
            ]
        )
        weights = np.bincount(nearest, counts, minlength=codes)
        sums = np.stack([np.bincount(nearest, counts * column, minlength=codes) for column in points.T], 1)
        moved = np.where(weights[:, None] > 0, sums / np.maximum(weights, 1)[:, None], centres)
        if np.abs(moved - centres).max() < 1e-4:
            return moved.astype(np.float32)
        centres = moved


def save_patch_codebook(folder: str | Path, codebook: Array, patch: int, size: int | Sequence[int]) -> None:
    """Write the folder that `path` of an `image_tokens` decoder names; `size` is height and width of its pictures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    channels = codebook.shape[1] // patch**2
    config = {"patch": patch, "size": size, "channels": channels, "codes": len(codebook)}
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"codebook": codebook}, Path(folder) / "codebook.safetensors")
