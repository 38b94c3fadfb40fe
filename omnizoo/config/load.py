"""Load and validate a config from a YAML file, a mapping or a `Config`.

All mistakes in a config are reported together, one line each. This module imports neither torch nor transformers, so
errors appear quickly.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnizoo.config import reference
from omnizoo.config.error_text import KeyOrigin, explain
from omnizoo.config.errors import UserError, show_value
from omnizoo.config.foreign.lookup import detect_foreign
from omnizoo.config.overrides import apply_overrides, parse_overrides
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import PythonObject
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.yaml_file import parse_yaml, read_text

NO_DATA = "(none)"  # path of the placeholder source for commands that read no data
IN_PYTHON = "config"  # name of a config without a file, for error messages
# For each argument of `omnizoo.train`: the section and the key that its object sets, and the keys of the section that
# conflict with it.
PYTHON_ARGUMENTS = {
    "model": ("model", "given", ModelSection.exclusive["given"]),
    "tokenizer": ("model", "tokenizer", ("tokenizer",)),
    "data": ("data", "sources", ("sources",)),
    "eval_data": ("data", "eval_sources", ("eval_sources",)),
}


def load_config(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    objects: Mapping[str, Any] | None = None,
    needs_data: bool = True,
) -> Config:
    """Load and validate a config.

    Relative paths, in the file and on the command line, are relative to the working directory.

    Args:
        config: Path of a YAML file, a mapping, or a `Config`.
        overrides: Keys to set, in the form of command-line arguments: `["--train.lr", "1e-3", "--log.dir=runs/a"]`.
        objects: Python objects that were passed to `omnizoo.train`, keyed by the name of the argument.
        needs_data: If false, `data.sources` may be missing. It then defaults to one source with the path `NO_DATA`.

    Returns:
        The validated config.

    Raises:
        UserError: If the config is not valid. The message has one line for each mistake.
    """
    changes = parse_overrides(overrides)
    data, lines, path = read_config_file(config)
    if not isinstance(data, dict):
        content = "empty" if data is None else show_value(data)
        sections = ", ".join(reference.sections())
        raise UserError(f"{path}: the config is {content}; expected the sections {sections}")
    for argument, value in (objects or {}).items():
        if value is not None:
            _set_object(data, argument, value, path)
    apply_overrides(data, changes)
    if not needs_data:
        if data.get("data") is None:
            data["data"] = {}
        section = data["data"]
        if isinstance(section, dict):
            section.setdefault("sources", [{"path": NO_DATA}])

    try:
        return Config.model_validate(data)
    except ValidationError as error:
        _check_trainer(data, path)
        raise UserError(explain(error, data, KeyOrigin(path, lines, tuple(changes)))) from None


def _check_trainer(data: Mapping[str, Any], path: str) -> None:
    """Raise `UserError` if an invalid config belongs to another trainer."""
    trainer = detect_foreign(data)
    if trainer is not None and path != IN_PYTHON:
        raise UserError(
            f"{path}: this is a config of {trainer.title}. Run `omnizoo convert {path} --out NEW.yaml` and use "
            "the new file."
        )


def read_config_file(config: str | Path | Mapping[str, Any] | Config) -> tuple[Any, dict[str, int], str]:
    """Read the values of a config without validating them.

    Args:
        config: Path of a YAML file, a mapping, or a `Config`.

    Returns:
        The values, the line number of each dotted key (empty without a file), and a name for error messages.

    Raises:
        UserError: If the file cannot be read or is not valid YAML, or if `config` has another type.
    """
    if isinstance(config, Config):
        return config.model_dump(), {}, IN_PYTHON
    if isinstance(config, Mapping):
        return _copy_containers(config), {}, IN_PYTHON
    if not isinstance(config, str | Path):
        kind = type(config).__name__
        raise UserError(f"{IN_PYTHON}: the type is {kind}; expected the path of a YAML file, a mapping or a Config")
    value, lines = parse_yaml(read_text(config), str(config))
    return value, lines, str(config)


def _copy_containers(value: Any) -> Any:
    """Copy nested mappings and lists, so that later changes do not affect the user's mapping.

    Other values are not copied.
    """
    if isinstance(value, Mapping):
        return {key: _copy_containers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_containers(item) for item in value]
    return value


def _set_object(data: dict[str, Any], argument: str, value: Any, path: str) -> None:
    """Store a Python object as the value of its config key.

    Args:
        data: Values of the config. They are changed in place.
        argument: Name of the argument of `omnizoo.train`.
        value: The object.
        path: Name of the config, for error messages.

    Raises:
        UserError: If the config sets the same key, or one that cannot be combined with it.
    """
    section, key, exclusive_keys = PYTHON_ARGUMENTS[argument]
    if data.get(section) is None:
        data[section] = {}
    values = data[section]
    if not isinstance(values, dict):
        return  # validation reports that the section is not a mapping
    for other in exclusive_keys:
        if _is_set(values.get(other)):
            raise UserError(
                f"{path}: {section}.{other} is set, and {argument}= was passed to omnizoo.train. Keep one of them."
            )
    class_name = type(value).__qualname__
    name = class_name if argument == "model" else f"{argument}= ({class_name})"
    python_object = PythonObject(value, name)
    values[key] = [{"given": python_object}] if key.endswith("sources") else python_object


def _is_set(value: Any) -> bool:
    """Whether a key has a value. Sources of a saved config that were Python objects do not count as values."""
    if isinstance(value, list):
        python_objects = [item for item in value if isinstance(item, dict) and item.get("given")]
        return len(python_objects) < len(value)
    return bool(value)
