"""Identity of an adapter's base model: a hash of its weights, or of the config and seed that initialize them.

Only parts of large files are hashed. The hash distinguishes a model from its fine-tuned versions, but may not detect a
damaged byte.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.diffusion.denoiser import is_denoiser, read_denoiser
from omnizoo.models.read_config import read_model_config
from omnizoo.models.user_module import given_model, is_own_module, tensors_of
from omnizoo.models.weights.sampled_hash import add_sampled

VOLATILE = ("_name_or_path", "_diffusers_version", "transformers_version", "dtype", "torch_dtype", "architectures")


def base_identity(model: ModelSection, seed: int) -> str:
    """Return the hash of the base model that a config describes, independent of its location.

    Only one rank needs the hash.

    Args:
        model: The section `model` of the config.
        seed: Seed of randomly initialized weights (`train.seed`).
    """
    digest = xxhash.xxh3_128()
    if model.given is not None:
        for name, tensor in tensors_of(given_model(model)):
            digest.update(name.encode())
            content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().data)
        return digest.hexdigest()

    digest.update(json.dumps(_shape_of(model), sort_keys=True, default=str).encode())
    for folder in _weight_folders(model):
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(file.name.encode())
            add_sampled(digest, file)
    if model.path is None:  # some weights are randomly initialized
        digest.update(str(seed).encode())
    return digest.hexdigest()


def check_base_identity(adapter_base: str | None, model_base: str, adapter: str) -> None:
    """Check that an adapter was trained on the base model of the config.

    Args:
        adapter_base: The hash of the base that the adapter was trained on. None if it is unknown.
        model_base: The hash of the base that the config describes.
        adapter: Key and path of the adapter, for messages.
    """
    if adapter_base is not None and adapter_base != model_base:
        raise UserError(
            f"{adapter}: the adapter was trained on a different base model. The hash of its base is {adapter_base}, "
            f"but the hash of `model` (and train.seed, if weights are random) is {model_base}. "
            "Use the base model of the adapter."
        )


def _shape_of(model: ModelSection) -> Any:
    """Return the part of the config that determines the shape of the model."""
    if is_own_module(model):
        return [model.module, model.config]
    if is_denoiser(model):
        return {name: _without_volatile(config) for name, config in read_denoiser(model).configs.items()}
    return _without_volatile(read_model_config(model).to_dict())


def _without_volatile(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that determine what a model computes."""
    return {key: value for key, value in fields.items() if key not in VOLATILE}


def _weight_folders(model: ModelSection) -> list[Path]:
    """Return the folders of all published weights that the config names."""
    if is_denoiser(model):
        return list(read_denoiser(model).folders.values())
    sections: list[ModelSection | SubmoduleSettings | None] = [model, model.foundation]
    for modality in model.modalities.values():
        sections += [modality.encoder, modality.decoder]
    paths = [section.path for section in sections if section is not None]
    return [Path(local_path(path)) for path in paths if path is not None]
