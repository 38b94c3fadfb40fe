"""What the options of a built-in part may be: a mistake in them is found before torch is imported."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from omnizoo.config.doors import nearest

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Option:
    type: Any
    expected: str


def check_options(kind: str, known: Mapping[str, Option], options: Mapping[str, Any], key: str) -> None:
    """ValueError, which begins with the key, for an option that is not among those `known` of `kind`, or not so."""
    for name, value in options.items():
        if name not in known:
            listed = ", ".join(known) or "it has none"
            raise ValueError(f"{key}.{name} is no option of {kind} ({listed}){nearest(str(name), known)}")
        try:
            TypeAdapter(known[name].type, config=STRICT).validate_python(tuple_of(value))
        except ValidationError:
            shown = json.dumps(value, default=str)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            raise ValueError(f"{key}.{name} is {shown}; expected {known[name].expected}") from None


def tuple_of(value: Any) -> Any:
    """A list of the config as optimizers and losses take it."""
    return tuple(value) if isinstance(value, list) else value
