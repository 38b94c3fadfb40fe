"""What a published folder has besides weights, config and tokenizer: how its processor prepares media, and the
precision it is published in. A model carries both along, so that checkpoints and exports have them again.

Only files of these names are taken, and none of them is code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.modalities.processor_files import CHAT_TEMPLATE, PROCESSOR_FILES
from omnizoo.modalities.spoken import VOICES
from omnizoo.models.artefact import MOST_SETTINGS

CARRIED = "_omnizoo_published"  # where a model keeps them
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Carried:
    dtype: torch.dtype | None = None  # None: the weights were not published
    files: Mapping[str, bytes] = field(default_factory=dict)  # by name


def read_published(folder: Path, config: Any, has_weights: bool) -> Carried:
    """What `folder` has of these. `config` is as it was read: building a model sets its dtype."""
    files = {name: _read(folder / name) for name in (*PROCESSOR_FILES, VOICES) if (folder / name).is_file()}
    return Carried(_dtype(folder, config) if has_weights else None, files)


def read_voices_beside(folder: str | None) -> Carried:
    """Those of a tokenizer's folder, for a model without its own folder: a small copy of a published one."""
    file = Path(folder) / VOICES if folder is not None else None
    return Carried(files={VOICES: _read(file)} if file is not None and file.is_file() else {})


def _read(file: Path) -> bytes:
    if file.stat().st_size > MOST_SETTINGS:
        raise UserError(f"{file} is too large for a file of settings")
    return file.read_bytes()


def also_carry(model: nn.Module, name: str, file: str, key: str) -> None:
    """Let `model` keep `file`, which `key` of the config names, as the one called `name`."""
    if not isinstance(file, str) or not Path(file).is_file():
        raise UserError(f"{key}: {file!r} is no file")
    known = carried(model)
    carry(model, replace(known, files={**known.files, name: _read(Path(file))}))


def carry(model: nn.Module, published: Carried) -> None:
    """Let `model` keep it, so that whoever has the model has it."""
    vars(model)[CARRIED] = published


def carried(model: nn.Module) -> Carried:
    found: Carried = vars(model).get(CARRIED) or Carried()
    return found


def write_processor(model: nn.Module, out: Path, has_template: bool) -> None:
    """`has_template`: the tokenizer has a chat template of its own, which is the one that the run has used."""
    for name, content in carried(model).files.items():
        if name != CHAT_TEMPLATE or not has_template:
            (out / name).write_bytes(content)


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """In a config and those inside of it."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            set_dtype(inner, dtype)


def _dtype(folder: Path, config: Any) -> torch.dtype | None:
    """As the config says; else as most families do it, by the first of the weights."""
    text = config.get_text_config()
    for declared in (getattr(config, "dtype", None), getattr(text, "dtype", None)):
        if isinstance(declared, torch.dtype):
            return declared
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                if (found := DTYPES.get(str(tensors.get_slice(key).get_dtype()))) is not None:
                    return found
    return None
