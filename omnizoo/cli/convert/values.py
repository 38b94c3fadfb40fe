"""Conversions of values that the tables in `omnizoo.config.foreign` name.

Each returns the value of our key, or raises `NoCounterpartError` with the reason.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import ROW_FORMATS
from omnizoo.config.yaml_file import parse_yaml, read_text

TEXT_FORMATS = {"completion": "text", "alpaca": "alpaca", "chat_template": "messages"}


class NoCounterpartError(Exception):
    """A value that has no counterpart. The message is the reason."""


def whole_number(value: Any, source: "ConversionContext") -> Any:
    """Convert a number of steps to an integer. Fractions have no counterpart."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NoCounterpartError("set a number of steps")
    return value


def as_list(value: Any, source: "ConversionContext") -> list[Any]:
    """Convert a value to a list. Text is split at commas and spaces."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return list(value) if isinstance(value, list) else [value]


def first(value: Any, source: "ConversionContext") -> Any:
    """Return the only item of a list."""
    items = as_list(value, source)
    if len(items) != 1:
        raise NoCounterpartError("set one value")
    return items[0]


def targets(value: Any, source: "ConversionContext") -> list[str]:
    """Convert the names of target modules to values of `model.adapter.targets`."""
    items = [str(item) for item in as_list(value, source)]
    if any(re.search(r"[\\^$|()]", item) for item in items):
        raise NoCounterpartError("model.adapter.targets has names or glob patterns, not regular expressions")
    return ["all-linear" if item in ("all", "all-linear") else item for item in items]


def reports(value: Any, source: "ConversionContext") -> Any:
    """Convert a list of loggers to the name of the W&B project, if W&B is one of them."""
    if "wandb" in as_list(value, source):
        return source.fields.get("wandb_project") or source.fields.get("run_name") or "omnizoo"
    raise NoCounterpartError("log.tensorboard is true by default")


def unless_path(value: Any, source: "ConversionContext") -> Any:
    """Return the folder of a model config, unless the model has a path."""
    if source.fields.get("model", {}).get("model_path"):
        raise NoCounterpartError("model.path contains the config")
    return value


def template(value: Any, source: "ConversionContext") -> Any:
    """Reject the name of a chat template, because the tokenizer's own template is used."""
    raise NoCounterpartError("the chat template of the tokenizer is used; data.chat_template sets a file")


def datasets(value: Any, source: "ConversionContext") -> list[dict[str, Any]]:
    """Return `data.sources` for names, paths, or mappings with a path."""
    items = as_list(value, source)
    sources: list[dict[str, Any]] = []
    for item in items:
        sources += [_from_mapping(item)] if isinstance(item, dict) else _from_name(str(item), source)
    if not sources:
        raise NoCounterpartError("set data.sources")
    return sources


def _from_mapping(item: dict[str, Any]) -> dict[str, Any]:
    """Return a source for a mapping such as axolotl's `{path, type, split, field_messages}`."""
    files = item.get("data_files")
    path = item.get("path") or item.get("dataset_name")
    if files:
        path = files[0] if isinstance(files, list) else files
    elif item.get("ds_type") and str(path) == item["ds_type"]:
        path = None
    if not path:
        raise NoCounterpartError("an entry has no path")
    result: dict[str, Any] = {"path": str(path)}
    kind = str(item.get("type") or "").partition(".")[0]
    row_format = TEXT_FORMATS.get(kind)
    if row_format in ROW_FORMATS and kind != "chat_template":
        result["format"] = row_format
    if item.get("split") and not files:
        result["split"] = str(item["split"])
    if item.get("field_messages") not in (None, "messages", "conversations"):
        result["columns"] = {"messages": item["field_messages"]}
    elif item.get("field") not in (None, "text"):
        result["columns"] = {"text": item["field"]}
    unread = set(item) - {"path", "type", "split", "data_files", "ds_type", "field", "field_messages", "dataset_name"}
    source_note = ", ".join(sorted(unread))
    if source_note:
        result["#"] = f"not converted: {source_note}"
    return result


def _from_name(name: str, source: "ConversionContext") -> list[dict[str, Any]]:
    """Return the sources for a path, a name in dataset_info.json, or a file with a mix of sources."""
    name, _, sampled = name.partition("#")
    known = source.dataset_info().get(name)
    if isinstance(known, dict):
        return [_from_info(name, known, source)]
    if name.endswith((".yaml", ".yml")):
        return _from_mix(name, source)
    result: dict[str, Any] = {"path": name.partition("::")[2] or name}
    if sampled:
        result["#"] = f"{sampled} rows there; OmniZoo reads all of them"
    return [result]


def _from_info(name: str, known: dict[str, Any], source: "ConversionContext") -> dict[str, Any]:
    """Return the source for an entry of dataset_info.json."""
    file = known.get("file_name")
    path = str(source.dataset_dir / file) if file else known.get("hf_hub_url") or known.get("script_url")
    if not path:
        raise NoCounterpartError(f"{name} in dataset_info.json has no file_name")
    result: dict[str, Any] = {"path": path}
    if known.get("split"):
        result["split"] = known["split"]
    ours = {"prompt": "instruction", "query": "input", "response": "output", "messages": "messages", "system": "system"}
    columns = {ours[key]: value for key, value in (known.get("columns") or {}).items() if key in ours}
    is_sharegpt = known.get("formatting") == "sharegpt"
    renamed = {key: value for key, value in columns.items() if value not in (key, "conversations")}
    if renamed:
        result["columns"] = renamed
    if not is_sharegpt and not known.get("ranking") and columns.keys() & {"instruction"}:
        result["format"] = "alpaca"
    return result


def _from_mix(name: str, source: "ConversionContext") -> list[dict[str, Any]]:
    """Return the sources in a file that lists them with weights."""
    file = Path(name) if Path(name).is_file() else source.folder / name
    if not file.is_file():
        return [{"path": name, "#": "a mix of sources; list its sources here"}]
    try:
        content, _ = parse_yaml(read_text(file), str(file))
    except UserError as error:
        raise NoCounterpartError(str(error)) from None
    paths = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        return [{"path": name, "#": "a mix of sources; list its sources here"}]
    schedule = content.get("schedule") or content.get("schedules") or []
    weights = schedule[0].get("weights") if schedule and isinstance(schedule[0], dict) else None
    if isinstance(weights, list) and len(weights) == len(paths):
        return [{"path": path, "weight": float(weight)} for path, weight in zip(paths, weights, strict=True)]
    return [{"path": path} for path in paths]


class ConversionContext:
    """Inputs of a conversion in addition to the value: all fields, and the folder of the file."""

    def __init__(self, fields: dict[str, Any], folder: Path) -> None:
        self.fields = fields
        self.folder = folder

    @property
    def dataset_dir(self) -> Path:
        """Folder of dataset_info.json."""
        return Path(str(self.fields.get("dataset_dir") or "data"))

    def dataset_info(self) -> dict[str, Any]:
        """Return the content of dataset_info.json, or an empty mapping."""
        for folder in (self.dataset_dir, self.folder / self.dataset_dir):
            file = folder / "dataset_info.json"
            if file.is_file():
                content, _ = parse_yaml(read_text(file), str(file))
                return content if isinstance(content, dict) else {}
        return {}


CONVERSIONS: dict[str, Callable[[Any, ConversionContext], Any]] = {
    "whole_number": whole_number,
    "list": as_list,
    "first": first,
    "targets": targets,
    "reports": reports,
    "unless_path": unless_path,
    "template": template,
    "datasets": datasets,
}
