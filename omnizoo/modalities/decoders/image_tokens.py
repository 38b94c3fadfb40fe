"""Decoder for images as a grid of VQ codes, predicted in raster order."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, LikelihoodDecoder
from omnizoo.modalities.decoders.image_tokenizers import DiffusersTokenizer, HFTokenizer, PatchTokenizer, Tokenizer
from omnizoo.modalities.files.decoding import IMAGE_OPTIONS
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.files.pixels import read_pixels, to_pil_image
from omnizoo.modalities.files.preview import thumbnail
from omnizoo.modalities.frozen_tokenizer import forward_flops, read_settings
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.ops.loss.linear_cross_entropy import CHUNK, LinearHead, linear_cross_entropy
from omnizoo.ops.loss.log_probability import by_rows, log_probabilities


class ImageCodes(LikelihoodDecoder, Decoder):
    """Decoder for images as codes of a frozen tokenizer. A target is (code, position in the grid).

    The position is part of the target, because `embed` needs it and cannot infer it from neighboring targets. The
    tokenizer is a VQ model of transformers that was saved separately (`model.vqmodel.save_pretrained(...)`), a VQ model
    of diffusers, or a folder that `save_patch_codebook` wrote.

    Args:
        width: Width of the foundation.
        config: Config of the tokenizer.
        folder: Folder of the tokenizer.
        size: Height and width of all images, or one number for square images. Defaults to the size in the config.
        head: `linear` or `mlp`.
    """

    item_options = IMAGE_OPTIONS

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
        self.num_codes = height * self.columns
        self.codes = nn.Embedding(self.tokenizer.codes, width)
        self.row = nn.Embedding(height, width)
        self.column = nn.Embedding(self.columns, width)
        if head not in ("linear", "mlp"):
            raise UserError(f"decoder.head: {head!r} is unknown. Use linear or mlp.")
        last = nn.Linear(width, self.tokenizer.codes)
        self.head = last if head == "linear" else nn.Sequential(nn.Linear(width, width), nn.GELU(), last)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.codes, self.row, self.column):  # typical scale of language model embeddings
            nn.init.normal_(table.weight, std=0.02)

    @property
    def config(self) -> PreTrainedConfig | dict[str, Any]:
        """The config of the tokenizer. With it, the same decoder can be rebuilt without the folder."""
        return self.tokenizer.config

    @property
    def pretrained(self) -> PreTrainedModel | None:
        return self.tokenizer.model if isinstance(self.tokenizer, HFTokenizer) else None

    def measure(self, media: Media) -> MediaSize:
        image_size(media)
        return MediaSize(self.num_codes, cost=self._work)

    @cached_property
    def _work(self) -> float:
        return forward_flops(self.tokenizer, self.dummy_input()["pixels"])

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": read_pixels(media, self.tokenizer.size, self.tokenizer.channels)}

    def dummy_input(self) -> Inputs:
        return {"pixels": torch.zeros(self.tokenizer.channels, *self.tokenizer.size, dtype=torch.uint8)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        codes = torch.stack([self.tokenizer.encode(item["pixels"]).flatten() for item in items])
        positions = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
        return torch.stack([codes, positions], -1).flatten(0, 1)

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        codes, positions = targets.unbind(-1)
        rows = positions // self.columns
        columns = positions % self.columns
        embedded: torch.Tensor = self.codes(codes) + self.row(rows) + self.column(columns)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        *before, last = self.head if isinstance(self.head, nn.Sequential) else [self.head]
        for layer in before:
            hidden = layer(hidden)
        if type(last) is nn.Linear and len(hidden) * last.out_features > CHUNK:
            return linear_cross_entropy(hidden, LinearHead(last.weight, last.bias), targets[:, 0])
        return code_loss(last(hidden), targets[:, 0])

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def chunk_likelihood(chunk_hidden: torch.Tensor, chunk_targets: torch.Tensor) -> torch.Tensor:
            return log_probabilities(self.head(chunk_hidden), chunk_targets[:, 0])

        rows_per_chunk = max(1, CHUNK // self.tokenizer.codes)
        likelihood = by_rows(chunk_likelihood, hidden, targets, rows_per_chunk)
        return likelihood, torch.ones_like(likelihood)

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        if len(targets) == self.num_codes:
            return None
        code = sampling.draw(self.head(hidden[None]))
        return torch.cat([code, code.new_tensor([len(targets)])])

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        codes = targets[:, 0].view(self.tokenizer.grid)
        return to_pil_image(self.tokenizer.decode(codes))

    def save(self, item: Any, stem: str) -> str:
        item.save(f"{stem}.png")
        return f"{stem}.png"

    def preview(self, media: Media) -> str:
        return thumbnail(read_image(media, self.tokenizer.channels), media.name)


def code_loss(logits: torch.Tensor, codes: torch.Tensor, ignore: int = -100) -> torch.Tensor:
    """Return the cross-entropy `[N]` of each code, in fp32 or wider. It is 0 for codes that equal `ignore`."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, codes, reduction="none", ignore_index=ignore)


def _tokenizer(
    config: PreTrainedConfig | dict[str, Any] | None, folder: str | None, size: int | Sequence[int] | None
) -> Tokenizer:
    """Build the tokenizer that `config` describes. If `config` is None, use the config.json of the folder."""
    weights = folder if config is None else None  # with a config, the weights are loaded separately
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
        f"decoder.path: {folder} is not an image tokenizer. "
        "Use a folder of transformers, of diffusers or of save_patch_codebook."
    )
