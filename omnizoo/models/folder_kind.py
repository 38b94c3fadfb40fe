"""Descriptions of folders that are not transformers models: the content of a folder, and advice.

Only names of files and small JSON files are read.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.versions import install_command, installed_versions
from omnizoo.models.untrusted_folders import read_json, shorten

DIFFUSERS = "diffusers"
# A file that identifies the kind of a folder -> description of the folder, and advice.
FILES = {
    "adapter_config.json": (
        "it is an adapter of PEFT. Set model.path to the base model, and model.adapter.path to this folder"
    ),
    "params.json": (
        "it has weights in the format of the original release (params.json). Use the repository or folder that is in "
        "the format of transformers"
    ),
    "modules.json": (
        "it is a pipeline of sentence-transformers. Use the folder of its transformers model, often `0_Transformer`"
    ),
    "open_clip_config.json": "it is a model of open_clip. Use its version in the format of transformers",
    "*.nemo": "it is a NeMo model. Convert it to the format of transformers",
    "*.gguf": "it has quantized weights for llama.cpp (GGUF). Use the folder of the original model",
    "*.ckpt": "it has only weights (.ckpt). Use a folder in the format of transformers",
    "manifest.json": "it is a checkpoint. Use checkpoint.resume or model.init_from, or run `omnizoo export` first",
    "checkpoints": "it is a run folder. Run `omnizoo export`, and use the exported folder",
}


def describe_folder(folder: Path) -> str:
    """Describe a folder that has no usable config.json, and advise what to do."""
    if (folder / "model_index.json").is_file():
        class_name = read_json(folder / "model_index.json").get("_class_name", "unknown class")
        return f"it is a pipeline of diffusers ({shorten(class_name)}). {_diffusers_advice()}"
    for pattern, description in FILES.items():
        if any(folder.glob(pattern)):
            return description
    if not folder.is_dir():
        return "the folder does not exist"
    names = sorted(path.name for path in folder.iterdir())[:5]
    return f"it has no config.json; it contains {', '.join(names) or 'nothing'}"


def describe_config(fields: Mapping[str, Any]) -> str:
    """Describe a folder whose config.json has no `model_type`, and advise what to do."""
    if "_diffusers_version" in fields or "_class_name" in fields:
        class_name = shorten(fields.get("_class_name", "unknown class"))
        return f"it is a model of diffusers ({class_name}), not of transformers. {_diffusers_advice()}"
    if "architecture" in fields and "pretrained_cfg" in fields:
        return f"it is a model of timm ({shorten(fields['architecture'])}). Use a model of transformers"
    return "config.json has no `model_type`, so it is not a model of transformers. Check the name of the folder"


def check_family(model_type: str, key: str) -> None:
    """Raise a `UserError` if the installed transformers has no model family `model_type`."""
    from transformers import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return
    close = get_close_matches(model_type[:100], list(CONFIG_MAPPING), n=1, cutoff=0.8)
    hint = f" Did you mean {close[0]}?" if close else ""
    version = installed_versions(["transformers"]).get("transformers")
    raise UserError(
        f"{key}: the installed transformers {version} has no family {shorten(model_type)}.{hint} A newer release may "
        "contain it. Otherwise, use the code of the model as model.module."
    )


def _diffusers_advice() -> str:
    """Return the advice for a folder of diffusers."""
    if find_spec(DIFFUSERS) is None:
        return f"It needs the package diffusers, which is not installed; run: {install_command(DIFFUSERS)}"
    return "Use it as the `folder` of a decoder, or set model.path to a transformers model"
