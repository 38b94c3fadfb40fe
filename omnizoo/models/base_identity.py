"""Which base an adapter belongs to: a hash of the weights that it was trained on, or of the rule that draws them.

Of large files, some pieces are read: enough to tell one model from another trained from it, not to find a damaged byte.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.config.section import Part
from omnizoo.models.build import given_model, is_own_module, read_model_config, tensors_of

PIECES, PIECE = 64, 2**16  # of each file: how many pieces, and bytes of each
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")


def base_identity(config: Config) -> str:
    """The hash of the base that `config` describes, wherever its files are. One rank's work."""
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
    if model.path is None:  # some of it is drawn
        digest.update(str(config.train.seed).encode())
    return digest.hexdigest()


def check_base_identity(found: str | None, wanted: str, whose: str) -> None:
    """Refuse an adapter that was trained on another base than the config's."""
    if found is not None and found != wanted:
        raise UserError(
            f"{whose} was trained on another base: its hash is {found}, that of the config's `model` (and seed, where "
            f"weights are drawn) is {wanted}"
        )


def _shape_of(model: Model) -> Any:
    if is_own_module(model):
        return [model.module, model.config]
    fields = read_model_config(model).to_dict()
    return {key: value for key, value in fields.items() if key not in VOLATILE}


def _weight_folders(model: Model) -> list[Path]:
    """Of all published weights that the config names."""
    parts: list[Model | Part | None] = [model, model.foundation]
    parts += [part for modality in model.modalities.values() for part in (modality.encoder, modality.decoder)]
    return [Path(part.path) for part in parts if part is not None and part.path is not None]


def _pieces(file: Path) -> Iterator[bytes]:
    """Bytes from all over the file, its header (names and shapes) among them; all of a small one."""
    size = os.path.getsize(file)
    yield str(size).encode()
    with file.open("rb") as stream:
        for i in range(PIECES if size > PIECES * PIECE else 1):
            stream.seek(i * (size - PIECE) // PIECES if size > PIECES * PIECE else 0)
            yield stream.read(PIECE if size > PIECES * PIECE else size)
