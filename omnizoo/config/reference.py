"""List every config key with its type, default and description, as defined in the schema.

The list is the source of `omnizoo train --help SECTION`, of shell completion, of the expected types in error messages,
and of the configuration reference in the documentation (docs/generators/configuration.py).
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from omnizoo.config.schema import Config
from omnizoo.config.sections.base import ConfigSection
from omnizoo.config.type_text import annotation_text, choices_in, sections_in, with_bounds


class Key(NamedTuple):
    """One row of the configuration reference."""

    key: str  # dotted key; N is an index, NAME a name that the user chooses
    type: str
    default: str
    description: str
    choices: tuple[str, ...]  # built-in values that the key accepts; empty for other types


def all_keys() -> list[Key]:
    """Return every key, in the order of the schema."""
    return list(_keys_of(Config, ""))


def sections() -> dict[str, str]:
    """Return the description of each section, keyed by its name."""
    return {name: _description(field) for name, field in Config.model_fields.items()}


def _description(field: FieldInfo) -> str:
    """Return the description of a key as one line."""
    return " ".join((field.description or "").split())


def schema_key(key: str) -> str:
    """Replace indices with `N` and names that the user chose with `NAME`.

    For example, `data.sources.0.path` becomes `data.sources.N.path`.
    """
    for mapping in _named():
        key = re.sub(rf"^({re.escape(mapping)})\.[^.]+", r"\1.NAME", key)
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", key)


@cache
def exclusive_keys() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the mutually exclusive keys (`ConfigSection.exclusive`) of each section that has some.

    The result is keyed by the schema key of the section, such as `train`, `data.sources.N` or `optimizer.groups.N`.
    """
    return dict(_exclusive_in(Config, ""))


def _exclusive_in(section: type[ConfigSection], prefix: str) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    """Yield (schema key of the section, exclusive keys) for a section and for the sections nested in it."""
    if section.exclusive:
        yield prefix.removesuffix("."), section.exclusive
    for name, field in section.model_fields.items():
        for nested, nested_prefix in sections_in(field.annotation):
            yield from _exclusive_in(nested, f"{prefix}{name}.{nested_prefix}")


@cache
def _named() -> frozenset[str]:
    """Return the keys of mappings with user-defined names, such as `model.modalities`."""
    return frozenset(known.key.partition(".NAME.")[0] for known in all_keys() if ".NAME." in known.key)


def _keys_of(section: type[ConfigSection], prefix: str) -> Iterator[Key]:
    """Yield the keys of a section and of the sections nested in it."""
    for name, field in section.model_fields.items():
        key = prefix + name
        if key not in Config.model_fields:  # top-level sections are headings and not keys
            yield Key(
                key=key,
                type=with_bounds(annotation_text(field.annotation), field.metadata),
                default=_default_text(field),
                description=_description(field),
                choices=tuple(choices_in(field.annotation, field.metadata)),
            )
        for nested, nested_prefix in sections_in(field.annotation):
            yield from _keys_of(nested, f"{key}.{nested_prefix}")


def _default_text(field: FieldInfo) -> str:
    """Return the default of a key as YAML, or `required`."""
    if field.is_required():
        return "required"
    return _value_text(field.get_default(call_default_factory=True))


def _value_text(value: Any) -> str:
    """Return a value as YAML on one line. For a section, include only the keys that were set explicitly."""
    if isinstance(value, ConfigSection):
        keys_set = [key for key in type(value).model_fields if key in value.model_fields_set]
        entries = [f"{key}: {_value_text(getattr(value, key))}" for key in keys_set]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)
