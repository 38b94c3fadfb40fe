"""Identity of an adapter's base model: a hash of its weights, or of the config and seed that initialize them.

Large files are hashed in part. This distinguishes a model from one that was fine-tuned from it, but does not detect a
damaged byte.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.read_config import read_model_config
from omnizoo.models.user_module import given_model, is_own_module, tensors_of

PIECES, PIECE = 64, 2**16  # pieces per file, and bytes per piece
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def base_identity(config: Config) -> str:
    """Return the hash of the base model that `config` describes, independent of its location.

    Only one rank needs it.
    """
    model, digest = config.model, xxhash.xxh3_128()
    if model.given is not None:
        for name, tensor in tensors_of(given_model(model)):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()
    digest.update(json.dumps(_shape_of(model), sort_keys=True, default=str).encode())
    for folder in _weight_folders(model):
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(file.name.encode())
            for piece in _pieces(file):
                digest.update(piece)
    if model.path is None:  # some weights are randomly initialized
        digest.update(str(config.train.seed).encode())
    return digest.hexdigest()


def check_base_identity(found: str | None, wanted: str, whose: str) -> None:
    """Check that an adapter was trained on the base model of the config."""
    if found is not None and found != wanted:
        raise UserError(
            f"{whose} was trained on another base: its hash is {found}, that of the config's `model` (and seed, where "
            f"weights are drawn) is {wanted}"
        )


def _shape_of(model: ModelSection) -> Any:
    """Return the part of the config that determines the shape of the model."""
    if is_own_module(model):
        return [model.module, model.config]
    fields = read_model_config(model).to_dict()
    return {key: value for key, value in fields.items() if key not in VOLATILE}


def _weight_folders(model: ModelSection) -> list[Path]:
    """Return the folders of all published weights that the config names."""
    parts: list[ModelSection | SubmoduleSettings | None] = [model, model.foundation]
    parts += [part for modality in model.modalities.values() for part in (modality.encoder, modality.decoder)]
    return [Path(part.path) for part in parts if part is not None and part.path is not None]


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield bytes from the complete range of a file, including its header (names and shapes).

    A small file is read in full.
    """
    size = os.path.getsize(file)
    yield str(size).encode()
    with file.open("rb") as stream:
        if size <= PIECES * PIECE:
            yield stream.read()
            return
        for i in range(PIECES):
            stream.seek(i * (size - PIECE) // PIECES)
            yield stream.read(PIECE)
