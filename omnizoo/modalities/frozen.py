"""The frozen part of a decoder: a published tokeniser or autoencoder, built without weights and never trained.

The framework fills Hugging Face models through `Decoder.pretrained`; diffusers' models read their own folder when
weights are drawn. Each is given one item at a time: a batch could round a code to its neighbour, and then what an item
is trained on would depend on which other items share its rank.
"""

import json
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.tally import measured_flops


class Frozen(nn.Module):
    """Holds `model` with no gradients and always in eval mode, whatever mode the decoder around it is in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def stored(self) -> dict[str, torch.Tensor]:
        """Weights that it reads from a folder of its own, by name."""
        return {}

    @property
    def like(self) -> torch.Tensor:
        """An empty tensor with the dtype and device of its weights."""
        weight = next(self.model.parameters())
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def encode(self, item: torch.Tensor) -> torch.Tensor:
        """What it makes of one item."""
        raise NotImplementedError


def tokenisers(model: nn.Module) -> dict[str, nn.Module]:
    """The frozen parts of `model`, by name: decoders' own, and those inside of published models, which are known by
    having a codebook (`quantize` or `quantizer`) and a way to it (`encode`)."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        makes_codes = isinstance(module, PreTrainedModel) and hasattr(module, "encode")
        has_codebook = hasattr(module, "quantize") or hasattr(module, "quantizer")
        if isinstance(module, Frozen) or (name and makes_codes and has_codebook):
            found[name] = module
    return found


def forward_flops(
    frozen: nn.Module, item: torch.Tensor, encode: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
) -> float:
    """Of `encode`, counted without memory; of one that wants to see values, a guess by its weights."""
    skeleton: Any = deepcopy(frozen).to("meta")
    try:
        with torch.no_grad():
            given = item.to("meta")
            counted = measured_flops(lambda: encode(skeleton, given) if encode else skeleton.encode(given))[0]
    except (RuntimeError, ValueError, TypeError):
        counted = 0.0
    return counted or 2.0 * math.prod(item.shape[-2:]) * sum(t.numel() for t in frozen.state_dict().values())


class Diffusers(Frozen):
    """A model of diffusers, from its `config` (as in config.json) or its folder; random weights without a folder."""

    def __init__(self, config: Mapping[str, Any], folder: str | None) -> None:
        package = diffusers_package(config["_class_name"])
        model_class = getattr(package, str(config["_class_name"]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, package.ModelMixin)):
            raise UserError(
                f"decoder: this diffusers has no model `{config['_class_name']}`; see _class_name in config.json"
            )
        build: Any = model_class
        super().__init__(build.from_config(dict(config)))
        self.folder = folder
        if not self.like.is_meta:  # where there is no memory yet, weights are asked for later
            self.load_state_dict(self.stored(), strict=False)

    def stored(self) -> dict[str, torch.Tensor]:
        if self.folder is None:
            return {}
        try:  # by diffusers' own loader, which knows older names of weights
            stored, info = type(self.model).from_pretrained(
                self.folder,
                use_safetensors=True,
                local_files_only=True,
                low_cpu_mem_usage=False,
                output_loading_info=True,
            )
        except OSError as error:
            raise UserError(f"decoder.path: cannot load {self.folder}: {first_line(error)}") from error
        if info["missing_keys"]:
            raise UserError(f"decoder.path: {self.folder} lacks weights of its model: {info['missing_keys'][:3]}")
        return {f"model.{name}": tensor for name, tensor in stored.state_dict().items()}


def diffusers_package(wanted: str) -> Any:
    try:
        return import_module("diffusers")
    except ImportError as error:
        raise UserError(f"decoder: {wanted} needs diffusers: pip install diffusers ({error})") from error


def read_settings(folder: str | None) -> dict[str, Any]:
    """The config.json of a folder; empty if there is none."""
    if folder is None or not (file := Path(folder) / "config.json").is_file():
        return {}
    try:
        settings: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    return settings
