"""Apply overrides of config keys from the command line, `--section.key value`, to the values of a file."""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from omnizoo.config import reference
from omnizoo.config.error_text import COMMAND_LINE, TYPES
from omnizoo.config.errors import UserError, join_mistakes, printable, shorten, show_value
from omnizoo.config.yaml_file import MAX_DEPTH, parse_yaml


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """Parse overrides: `["--train.lr", "1e-3", "--log.dir=a"]` -> `{"train.lr": 0.001, "log.dir": "a"}`.

    If a key is repeated, the last value applies.

    Args:
        args: Command-line arguments that are neither options nor the path of the config.

    Returns:
        The parsed value of each dotted key.

    Raises:
        UserError: If an argument has another form, or a value is not valid YAML.
    """
    changes: dict[str, Any] = {}
    rest = iter(args)
    for arg in rest:
        flag, equals, text = arg.partition("=")
        if not flag.startswith("--"):
            quoted = printable(repr(arg))
            raise UserError(f"{COMMAND_LINE}: unexpected argument {quoted}; expected --section.key value")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise UserError(
                    f"{COMMAND_LINE}: {flag} needs a value; write {flag} VALUE, or {flag}=VALUE if VALUE begins with --"
                )
        key = flag.removeprefix("--")
        changes[key], _ = parse_yaml(text, f"{COMMAND_LINE}: {flag} {show_value(text)}", key)
    return changes


def apply_overrides(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply overrides to the values of a file.

    An override removes the keys of the file that cannot be set together with it. Null unsets a key.

    Args:
        data: Values of the file. They are changed in place.
        changes: The value of each dotted key, from `parse_overrides`.

    Raises:
        UserError: If keys cannot be set. The message has one line for each of them.
    """
    mistakes = []
    for key, value in changes.items():
        is_off = value is None or value is False or value == {} or value == []
        if not is_off:
            _unset_exclusive(data, key)
    for key, value in changes.items():
        try:
            apply_override(data, key, value)
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError(join_mistakes(mistakes))


def apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key, and create missing mappings and lists on the path of the key.

    Args:
        data: Values of the config. They are changed in place.
        key: The dotted key, such as `data.sources.0.path`.
        value: The new value; None to unset the key.

    Raises:
        ValueError: If a part of the key is not a valid list index, or if a parent of the key is a plain value.
    """
    parts = key.split(".")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"{COMMAND_LINE}: {shorten(key)} has more than {MAX_DEPTH} levels")

    is_unset = value is None and reference.schema_key(key) in TYPES
    container: Any = data
    for depth, part in enumerate(parts[:-1], start=1):
        index = _index_in(container, part, key, depth)
        child = container[index] if isinstance(container, list) else container.get(index)
        if child is None:
            if is_unset:
                return  # the key is already unset, so its parents need not exist
            child_key = reference.schema_key(".".join(parts[:depth]))
            is_list = TYPES.get(child_key, "").startswith("list")
            child = [] if is_list else {}
        container[index] = copy(child)  # copy, because another key may refer to the same object by a YAML alias
        container = container[index]
    index = _index_in(container, parts[-1], key, len(parts))
    if value is None and reference.schema_key(key).endswith(".NAME"):
        container.pop(index, None)  # null removes an entry that the user named
        return
    container[index] = value


def _unset_exclusive(data: dict[str, Any], key: str) -> None:
    """Remove all keys from `data` that cannot be set together with `key` or with a parent of `key`."""
    parts = key.split(".")
    container: Any = data
    for depth, part in enumerate(parts):
        section = reference.schema_key(".".join(parts[:depth]))
        exclusive = reference.exclusive_keys().get(section, {}).get(part, ())
        if isinstance(container, dict):
            for other in exclusive:
                container.pop(other, None)
        child = _child(container, part)
        if not isinstance(child, dict | list):
            return
        index = int(part) if isinstance(container, list) else part
        container[index] = copy(child)  # copy, because another key may refer to the same object by a YAML alias
        container = container[index]


def _child(container: Any, part: str) -> Any:
    """Return the value of a mapping or list for one part of a key; None if there is none."""
    if isinstance(container, dict):
        return container.get(part)
    is_index = re.fullmatch("[0-9]{1,6}", part) is not None and int(part) < len(container)
    return container[int(part)] if is_index else None


def _index_in(container: Any, part: str, key: str, depth: int) -> Any:
    """Convert one part of a dotted key to an index of a mapping or list.

    An index one past the end of a list is valid, and appends an empty item.

    Args:
        container: The mapping or list.
        part: The part of the key.
        key: The whole key, for error messages.
        depth: Number of parts up to and including `part`.

    Raises:
        ValueError: If `container` is a plain value, or if `part` is not a valid index of the list.
    """
    if isinstance(container, dict):
        return part
    parent = ".".join(key.split(".")[: depth - 1])
    if not isinstance(container, list):
        raise ValueError(
            f"{COMMAND_LINE}: {key}: {parent} is {show_value(container)}; expected a mapping to set {part!r} in"
        )
    if not re.fullmatch("[0-9]{1,6}", part) or int(part) > len(container):
        raise ValueError(
            f"{COMMAND_LINE}: {shorten(key)}: {parent} is a list; expected an index from 0 to {len(container)}, not "
            f"{show_value(part)}"
        )
    if int(part) == len(container):
        container.append(None)
    return int(part)
