"""The frozen part of a decoder: a pretrained tokenizer or autoencoder that is never trained.

It is built without weights. Hugging Face models are filled with weights through `Decoder.pretrained`; diffusers models
read their own folder during initialization. Items are encoded one at a time. In a batch, rounding could change a code,
so the targets of an item would depend on the other items of its rank.
"""

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
from omnizoo.config.versions import install_command
from omnizoo.modalities.flop_count import measured_flops
from omnizoo.modalities.processor_files import read_json_object


class Frozen(nn.Module):
    """Wraps a model that gets no gradients and stays in eval mode, regardless of the mode of the decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the weights that are read from a separate folder, keyed by name."""
        return {}

    @property
    def like(self) -> torch.Tensor:
        """An empty tensor with the dtype and device of the weights."""
        weight = next(self.model.parameters())
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def encode(self, item: torch.Tensor) -> torch.Tensor:
        """Return the codes or latents of one item."""
        raise NotImplementedError


def frozen_tokenizers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the frozen submodules of `model`, keyed by name: tokenizers of decoders and of multimodal HF models.

    A tokenizer of an HF model is recognized by its codebook (`quantize` or `quantizer`) and its method `encode`.
    """
    frozen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        makes_codes = isinstance(module, PreTrainedModel) and hasattr(module, "encode")
        has_codebook = hasattr(module, "quantize") or hasattr(module, "quantizer")
        if isinstance(module, Frozen) or (name and makes_codes and has_codebook):
            frozen[name] = module
    return frozen


def forward_flops(
    frozen: nn.Module, item: torch.Tensor, encode: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
) -> float:
    """Return the FLOPs of `encode`, counted on the meta device.

    The meta device has no values. If `encode` depends on values, the FLOPs are estimated from the number of weights.
    """
    skeleton: Any = deepcopy(frozen).to("meta")
    try:
        with torch.no_grad():
            meta_item = item.to("meta")
            flops, _ = measured_flops(lambda: encode(skeleton, meta_item) if encode else skeleton.encode(meta_item))
    except (RuntimeError, ValueError, TypeError):
        flops = 0.0
    if flops:
        return flops
    num_weights: int = sum(tensor.numel() for tensor in frozen.state_dict().values())
    num_pixels: int = math.prod(item.shape[-2:])
    return 2.0 * num_pixels * num_weights


class Diffusers(Frozen):
    """A diffusers model, built from `config` (the content of config.json). Without a folder, its weights are random."""

    def __init__(self, config: Mapping[str, Any], folder: str | None) -> None:
        package = diffusers_package(config["_class_name"])
        model_class = getattr(package, str(config["_class_name"]), None)
        if not (isinstance(model_class, type) and issubclass(model_class, package.ModelMixin)):
            raise UserError(
                f"decoder: the installed diffusers has no model `{config['_class_name']}`. "
                "Check _class_name in config.json, or upgrade diffusers."
            )
        build: Any = model_class
        super().__init__(build.from_config(dict(config)))
        self.folder = folder
        if not self.like.is_meta:  # on the meta device, `stored` is called later
            self.load_state_dict(self.stored(), strict=False)

    def stored(self) -> dict[str, torch.Tensor]:
        if self.folder is None:
            return {}
        try:  # the loader of diffusers converts older names of weights
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
            missing = ", ".join(info["missing_keys"][:3])
            raise UserError(f"decoder.path: {self.folder} is missing weights of the model: {missing}")
        return {f"model.{name}": tensor for name, tensor in stored.state_dict().items()}


def diffusers_package(class_name: str) -> Any:
    """Import the package diffusers, because `class_name` needs it, and return the package.

    Raises:
        UserError: If diffusers is not installed.
    """
    try:
        return import_module("diffusers")
    except ImportError as error:
        command = install_command("diffusers")
        raise UserError(f"decoder: {class_name} needs diffusers. Run `{command}` ({error}).") from error


def read_settings(folder: str | None) -> dict[str, Any]:
    """Return the content of a folder's config.json; {} if there is none."""
    if not folder:
        return {}
    file = Path(folder) / "config.json"
    return read_json_object(file) if file.is_file() else {}
