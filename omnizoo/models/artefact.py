"""A model folder is read, never run: what is checked before transformers is given one.

The one who wrote a folder need not be the one who loads it. Its files are data; code is imported only if the user's own
command line or config says so, and what a file names must be inside of the folder. SECURITY.md has the promises.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from omnizoo.config.errors import UserError, first_line

SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
FLOATING = (".weight", ".bias")
MOST_LAYERS = 10_000
MOST_SETTINGS = 64 * 2**20  # bytes of a JSON file; tokenizer.json is not read by us


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        if file.stat().st_size > MOST_SETTINGS:
            raise UserError(f"{file}: {file.stat().st_size} bytes are too many for a file of settings")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: an object was expected, not {type(value).__name__}")
    return value


def check_settings(folder: Path, trust_remote_code: bool, key: str) -> dict[str, Any]:
    """Refuse a folder whose settings would run code that the user has not allowed; returns those of config.json.

    `auto_map` alone does no harm: where transformers knows the family, it is not looked at.
    """
    found = {name: read_json(folder / name) for name in SETTINGS if (folder / name).exists()}
    for name, settings in found.items():
        if not trust_remote_code and _needs_code(settings):
            raise UserError(
                f"{key}: {folder / name} would run code of its own ({_named_code(settings)}); read it, and if you "
                "trust it, allow it: --trust-remote-code (in a config model.trust_remote_code: true)"
            )
        for where, layers in _layers(settings):
            raise UserError(f"{key}: {folder / name}: {where} is {layers}; at most {MOST_LAYERS} layers are believed")
        for where, implementation in _kernels(settings):
            raise UserError(
                f"{key}: {folder / name} names {implementation!r} as its {where}, which is code to be downloaded; "
                "remove it from there, and name the implementation you want in model.attention"
            )
    return found.get("config.json", {})


def _needs_code(settings: dict[str, Any]) -> bool:
    """Whether transformers could make anything of it only by running the code it names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not settings.get("auto_map"):
        return False
    if "tokenizer_class" in settings:
        name = settings["tokenizer_class"]
        return not (isinstance(name, str) and tokenizer_class_from_name(name) is not None)
    family = settings.get("model_type")
    return isinstance(family, str) and family not in CONFIG_MAPPING


def _named_code(settings: dict[str, Any]) -> str:
    named = settings["auto_map"]
    values = named.values() if isinstance(named, dict) else named if isinstance(named, list) else [named]
    return ", ".join(str(value) for value in values if value)[:200]


def _kernels(settings: Any) -> Iterator[tuple[str, str]]:
    """Attention and experts by the name of a repository (`owner/name`), in a config or in one inside of it."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key.lstrip("_").endswith(("attn_implementation", "experts_implementation")):
                values = value.values() if isinstance(value, dict) else [value]
                yield from ((key, name) for name in values if isinstance(name, str) and "/" in name)
            yield from _kernels(value)


def _layers(settings: Any) -> Iterator[tuple[str, int]]:
    """Numbers of layers that nobody could build: constructors would try to."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key.endswith(("layers", "layer", "depth")) and isinstance(value, int) and value > MOST_LAYERS:
                yield key, value
            yield from _layers(value)


def inside(folder: Path, name: Any, where: str) -> Path:
    """The file of `folder` that one of its files names; it may not lead elsewhere."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{where} names {name!r}, which is not a file inside of {folder}")
    return folder / name


def tensor_names(file: Path) -> list[str]:
    """What a safetensors file holds, by its header: whatever is wrong with a file shows there, or in its length."""
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            kinds = {name: str(tensors.get_slice(name).get_dtype()) for name in names if name.endswith(FLOATING)}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: is damaged, or no safetensors file: {first_line(error)}") from error
    for name, kind in kinds.items():
        if not kind.startswith(("F", "BF")):
            raise UserError(f"{file}: {name} is stored as whole numbers ({kind}); quantised weights cannot be read")
    return names
