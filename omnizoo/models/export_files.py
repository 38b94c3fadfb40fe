"""Files and dtype of a published folder that checkpoints and exports must preserve.

These are processor settings, voices, and the dtype of the published weights. They are stored on the model object,
separately from weights, config and tokenizer. Only files with known names are read, and none of them is code.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.modalities.decoders.precomputed_speech import VOICES
from omnizoo.modalities.processor_files import CHAT_TEMPLATE, PROCESSOR_FILES
from omnizoo.models.untrusted_folders import open_weights, read_settings

CARRIED = "_omnizoo_published"  # attribute of a model that stores its `ExportFiles`
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class ExportFiles:
    """Content of the files to export, and the dtype of the published weights."""

    dtype: torch.dtype | None = None  # None if there are no published weights
    files: Mapping[str, bytes] = field(default_factory=dict)  # content, keyed by file name


def read_published(folder: Path, config: Any, has_weights: bool) -> ExportFiles:
    """Read the export files of `folder`.

    `config` must be the config as read from the folder, because building a model changes its dtype.
    """
    files = {name: read_settings(folder / name) for name in (*PROCESSOR_FILES, VOICES) if (folder / name).is_file()}
    return ExportFiles(_dtype(folder, config) if has_weights else None, files)


def read_voices_beside(folder: str | None) -> ExportFiles:
    """Read the voices from the folder of a tokenizer, for a model that has no folder, such as a small copy."""
    if folder is None or not (Path(folder) / VOICES).is_file():
        return ExportFiles()
    return ExportFiles(files={VOICES: read_settings(Path(folder) / VOICES)})


def also_carry(model: nn.Module, name: str, file: str, key: str) -> None:
    """Read `file` and store its content in `model` under `name`. `key` is the config key that names the file."""
    if not isinstance(file, str) or not Path(file).is_file():
        raise UserError(f"{key}: {file!r} is not a file")
    published = carried(model)
    files = {**published.files, name: read_settings(Path(file))}
    keep_export_files(model, replace(published, files=files))


def keep_export_files(model: nn.Module, published: ExportFiles) -> None:
    """Store the export files in `model`."""
    vars(model)[CARRIED] = published


def carried(model: nn.Module) -> ExportFiles:
    """Return the export files that `model` stores."""
    published: ExportFiles = vars(model).get(CARRIED) or ExportFiles()
    return published


def write_processor(model: nn.Module, out: Path, has_template: bool) -> None:
    """Write the export files to `out`.

    If `has_template`, the tokenizer contains the chat template of the run, so the separate template file is omitted.
    """
    for name, content in carried(model).files.items():
        if name != CHAT_TEMPLATE or not has_template:
            (out / name).write_bytes(content)


def set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Set the dtype of a config and of its sub-configs."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            set_dtype(inner, dtype)


def write_dtype(file: Path, dtype: torch.dtype, model_class: str) -> None:
    """Set the dtype, also of sub-configs, and the class of the model in a config.json."""
    fields = json.loads(file.read_text())
    name = str(dtype).removeprefix("torch.")

    def update(config: dict[str, Any]) -> None:
        if "dtype" in config:
            config["dtype"] = name
        for value in config.values():
            if isinstance(value, dict):
                update(value)

    update(fields)
    fields |= {"dtype": name, "architectures": [model_class]}
    file.write_text(json.dumps(dict(sorted(fields.items())), indent=2) + "\n")


def _dtype(folder: Path, config: Any) -> torch.dtype | None:
    """Return the dtype in the config. If the config has none, return the dtype of the first weight."""
    text = config.get_text_config()
    for declared in (getattr(config, "dtype", None), getattr(text, "dtype", None)):
        if isinstance(declared, torch.dtype):
            return declared
    with open_weights(sorted(folder.glob("*.safetensors"))) as weights:
        dtypes = (DTYPES.get(str(weight.get_dtype())) for weight in weights.values())
        return next((dtype for dtype in dtypes if dtype is not None), None)
