"""Checks of a model folder before transformers reads it. Folders are read as data, and their code does not run.

The author of a folder may not be trusted. Code is imported only if the user's command line or config allows it, and
file names in the files of a folder must not lead out of it. SECURITY.md lists the guarantees.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
MAX_SETTINGS_BYTES = 64 * 2**20  # per JSON file; we do not read tokenizer.json

LARGEST = 2**53  # results computed from larger numbers overflow
# Upper bounds for fields that count modules, by a pattern of the field's name. Building more modules would take too
# long.
MAX_COUNTS = {r"(layers?|depth|blocks)$": 10_000, r"experts?$": 100_000}


def read_settings(file: Path) -> bytes:
    """Return the content of a file after checking that it is small."""
    if file.stat().st_size > MAX_SETTINGS_BYTES:
        raise UserError(f"{file}: the file has {file.stat().st_size} bytes; expected at most {MAX_SETTINGS_BYTES}")
    return file.read_bytes()


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        value = json.loads(read_settings(file).decode())
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: contains a {type(value).__name__}; expected a JSON object")
    return value


def check_settings(folder: Path, trust_remote_code: bool, key: str, is_on_hub: bool = False) -> dict[str, Any]:
    """Check that the settings of a folder run no code that the user has not allowed. Return the fields of config.json.

    `auto_map` alone is harmless: transformers ignores it if the family is built in. Code of a repository on the hub is
    never downloaded, so it cannot be allowed.
    """
    advice = "Read the code. If you trust it, pass --trust-remote-code, or set model.trust_remote_code: true."
    if is_on_hub:
        advice = "OmniZoo downloads no code. Run `hf download`, read the code, and use the folder instead of the name."
    by_file = {name: read_json(folder / name) for name in SETTINGS if (folder / name).exists()}
    for name, settings in by_file.items():
        if (is_on_hub or not trust_remote_code) and _needs_code(settings):
            raise UserError(
                f"{key}: {folder / name} requires running code from the folder ({str(settings['auto_map'])[:200]}). "
                f"{advice}"
            )
        for field, implementation in _kernels(settings):
            raise UserError(
                f"{key}: {folder / name} sets {field} to {implementation!r}, which is code to download. "
                "Remove the field, and set model.attention to the implementation that you want."
            )
    config = by_file.get("config.json", {})
    check_numbers(config, f"{key}: {folder}/config.json")
    return config


def check_numbers(fields: Mapping[str, Any], key: str) -> None:
    """Check that numbers do not overflow and that counts of modules are small enough to build.

    Counts are recognized by field names that all families use.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            check_numbers(value, f"{key}.{field_name(name)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}.{field_name(name)}: {value} is not finite; expected a finite number")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{key}.{field_name(name)}: {shorten(value)} is too large; expected at most {LARGEST:,}")
        elif isinstance(value, int):
            for pattern, maximum in MAX_COUNTS.items():
                if value > maximum and re.search(pattern, str(name)):
                    raise UserError(f"{key}.{name}: {value} is too large; expected at most {maximum:,}")


def field_name(field: Any) -> str:
    """Return a field name for messages, shortened if necessary."""
    return str(field) if str(field).isidentifier() and len(str(field)) <= 60 else shorten(field)


def shorten(value: Any) -> str:
    """Return `repr(value)` with at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _needs_code(settings: dict[str, Any]) -> bool:
    """Whether these settings need remote code: they have an `auto_map`, and transformers has no class for them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not settings.get("auto_map"):
        return False
    if "tokenizer_class" in settings:
        name = settings["tokenizer_class"]
        return not (isinstance(name, str) and tokenizer_class_from_name(name) is not None)
    family = settings.get("model_type")
    return isinstance(family, str) and family not in CONFIG_MAPPING


def _kernels(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of attention and experts implementations that name a repository, also in nested configs."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key.lstrip("_").endswith(("attn_implementation", "experts_implementation")):
                values = value.values() if isinstance(value, dict) else [value]
                yield from ((key, name) for name in values if isinstance(name, str) and "/" in name)
            yield from _kernels(value)


def inside(folder: Path, name: Any, source: str) -> Path:
    """Return the path of a file that another file of `folder` names. Raise a `UserError` if it leads out of `folder`.

    `source` is the key and the file that contains the name, for messages.
    """
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{source}: {name!r} is not a file in {folder}")
    return folder / name


@contextmanager
def open_weights(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Context manager that opens safetensors files and yields slices of their weights, keyed by name.

    A slice has a shape and a dtype. Its values are read when it is indexed.
    """
    with ExitStack() as opened:
        weights: dict[str, Any] = {}
        for file in files:
            tensors = opened.enter_context(safe_open(file, framework="pt"))
            weights |= {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 - not a dict
        yield weights


def tensor_names(file: Path) -> list[str]:
    """Return the keys of a safetensors file. This also detects damage to the header or the length of the file."""
    try:
        with open_weights([file]) as weights:
            dtypes = {name: str(weight.get_dtype()) for name, weight in weights.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: the file is damaged or is not a safetensors file: {first_line(error)}") from error
    for name, dtype in dtypes.items():
        if name.endswith(FLOATING) and not dtype.startswith(("F", "BF")):
            raise UserError(
                f"{file}: {name} is stored as integers ({dtype}). Quantized weights are not supported: use a folder "
                "with floating-point weights."
            )
    return list(dtypes)


def weight_files(folder: Path, key: str, stem: str = "model") -> list[Path]:
    """Return the safetensors files of a folder. If the folder has an index, it lists the files.

    `stem` is the file name without suffix: `model` for transformers.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{key}: {index} has no weight_map; expected a mapping of weights to files")
        files = sorted({inside(folder, name, f"{key}: {index}") for name in weight_map.values()})
    else:
        files = [folder / f"{stem}.safetensors"]

    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{key}: {folder} has no {list_names(absent)}. Weights are read only from safetensors files, never from "
            "pickles."
        )
    for file in files:
        tensor_names(file)
    return files


def list_names(names: Sequence[str]) -> str:
    """Return the first three names and the number of remaining names, for messages."""
    listed = ", ".join(names[:3])
    return f"{listed} and {len(names) - 3} more" if len(names) > 3 else listed
