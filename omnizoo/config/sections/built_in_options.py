"""Checks for the options of built-in losses and optimizers. They do not need torch."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from omnizoo.config.errors import show_value
from omnizoo.config.plugins import nearest
from omnizoo.config.type_text import annotation_text

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_options(kind: str, known: Mapping[str, Any], options: Mapping[str, Any], key: str) -> None:
    """Check the options of a built-in `kind`.

    Args:
        kind: The name of the loss or optimizer.
        known: The type of each option of this kind.
        options: The options in the config.
        key: The config key of the options; the message starts with it.

    Raises:
        ValueError: If an option is unknown or has a value of the wrong type.
    """
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            hint = nearest(str(name), known)
            raise ValueError(f"{key}.{name}: unknown option of {kind}; options: {listed}{hint}")
        try:
            TypeAdapter(known[name], config=STRICT).validate_python(to_tuple(value))
        except ValidationError:
            expected = annotation_text(known[name])
            raise ValueError(f"{key}.{name} is {show_value(value)}; expected {expected}") from None


def without_nulls(settings: Any, built_in: Collection[str], default_kind: Any) -> Any:
    """Return unvalidated settings without `options` that are null, if the kind is built in.

    Null unsets an option of a built-in kind. For a plugin, null is a value.

    Args:
        settings: A mapping with `options` and optionally `kind`. Other values are returned unchanged.
        built_in: The built-in kinds.
        default_kind: The kind if `settings` has none.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("options"), dict):
        return settings
    kind = settings.get("kind")
    if (default_kind if kind is None else kind) not in built_in:
        return settings
    options = {name: value for name, value in settings["options"].items() if value is not None}
    return settings | {"options": options}


def to_tuple(value: Any) -> Any:
    """Return a list as a tuple, because optimizers and losses expect tuples. Return other values unchanged."""
    return tuple(value) if isinstance(value, list) else value
