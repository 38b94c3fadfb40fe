"""Messages for validation errors, one line each.

A message contains the origin of the key, its value, the expected type, and the closest valid key.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnizoo.config import reference
from omnizoo.config.errors import MOST_MISTAKES, join_mistakes, shorten, show_value
from omnizoo.config.foreign_keys import moved_key, our_key
from omnizoo.config.sections.base import LONGEST_TEXT

COMMAND_LINE = "command line"
ALL_KEYS = "`omnizoo train --help` lists all keys"
LONGEST_KEY = 200  # characters; longer keys get no suggestion
KEYS = {key.key: key for key in reference.all_keys()}
TYPES = dict.fromkeys(reference.sections(), "mapping") | {name: key.type for name, key in KEYS.items()}
# Keys, and items of lists and mappings of sections: validators of sections raise errors at these locations.
LOCATIONS = set(TYPES) | {key.rpartition(".")[0] for key in KEYS}

Loc = tuple[int | str, ...]


@dataclass(frozen=True)
class KeyOrigin:
    """Origins of keys: the command line, or a line of the file."""

    path: str
    lines: dict[str, int]  # line number of each dotted key
    overridden: tuple[str, ...]  # keys on the command line

    def describe(self, loc: Loc) -> str:
        key = _dotted(loc)
        if any(f"{key}.".startswith(f"{changed}.") for changed in self.overridden):
            return COMMAND_LINE
        is_partly_overridden = any(changed.startswith(f"{key}.") for changed in self.overridden)
        suffix = f" and {COMMAND_LINE}" if is_partly_overridden else ""
        return f"{self.path}{self._line(loc)}{suffix}"

    def _line(self, loc: Loc) -> str:
        """Return `:LINE` of the key, or of its closest parent in the file."""
        for length in range(len(loc), 0, -1):
            key = _dotted(loc[:length])
            if key in self.lines:
                return f":{self.lines[key]}"
        return ""

    def typed_key(self, key: str) -> str | None:
        """Return the override that created the section `key`: `--trian.steps 3` creates `trian`."""
        return next((changed for changed in self.overridden if changed.startswith(f"{key}.")), None)


def explain(error: ValidationError, data: Any, origin: KeyOrigin) -> str:
    """Return one line for each mistake in `data`."""
    # A value that matches no type of a union has one error per type: keep one per key.
    details = {_cut_to_schema(detail): detail for detail in error.errors(include_url=False)}
    shown = list(details.items())[:MOST_MISTAKES]
    return join_mistakes((_explain(loc, detail, data, origin) for loc, detail in shown), len(details))


def _cut_to_schema(detail: ErrorDetails) -> Loc:
    """Cut the location of an error where it leaves the schema, at members of a union or items of a plain list.

    The result is empty for errors of the whole config, where sections contradict each other.
    """
    loc = detail["loc"]
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return loc
    locations = LOCATIONS if detail["type"] == "value_error" else TYPES
    lengths = range(len(loc), 0, -1)
    return next((loc[:n] for n in lengths if reference.schema_key(_dotted(loc[:n])) in locations), ())


def _explain(loc: Loc, detail: ErrorDetails, data: Any, origin: KeyOrigin) -> str:
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            return _explain_unknown(loc, origin)
        case "missing" if loc == detail["loc"]:
            return _explain_missing(loc, origin)
        case "value_error":
            return _explain_check(loc, detail["msg"].removeprefix("Value error, "), origin)
        case kind:
            return _explain_value(loc, kind, data, origin)


def _explain_unknown(loc: Loc, origin: KeyOrigin) -> str:
    key = _dotted(loc)
    typed_key = origin.typed_key(key)
    where = COMMAND_LINE if typed_key else origin.describe(loc)
    key = typed_key or key
    if (moved := moved_key(key)) is not None:
        return f"{where}: {moved}"
    return f"{where}: {shorten(key)} is not a key; {_suggest(key)}"


def _explain_missing(loc: Loc, origin: KeyOrigin) -> str:
    key = _dotted(loc)
    known = reference.schema_key(key)
    meaning = reference.sections().get(key) or KEYS[known].description
    return f"{origin.describe(loc)}: {key} is missing; expected {TYPES.get(known, '')}: {meaning}"


def _explain_check(loc: Loc, message: str, origin: KeyOrigin) -> str:
    """Explain an error that the validator of a section raised. Its message may start with the key."""
    first_word = message.split()[0].rstrip(":")
    named: Loc = tuple(first_word.split("."))
    if len(named) > 1 and named[0] in reference.sections():
        return f"{origin.describe(named)}: {message}"
    where = origin.describe(loc)
    return f"{where}: {message}" if len(loc) == 1 else f"{where}: {_dotted(loc)}: {message}"


def _explain_value(loc: Loc, kind: str, data: Any, origin: KeyOrigin) -> str:
    key = _dotted(loc)
    where = origin.describe(loc)
    expected = TYPES.get(reference.schema_key(key), "")
    value = data
    for part in loc:
        value = value[part]

    if kind == "string_too_short":
        return f"{where}: {key} is empty; expected {expected}"
    if kind == "string_too_long":
        return f"{where}: {key} is a text of {len(value):,} characters; at most {LONGEST_TEXT:,} are possible"
    hint = ""
    if expected.startswith("text") and isinstance(value, int | float):
        hint = "; put it in quotes, '\"...\"'" if where == COMMAND_LINE else "; put it in quotes"
    return f"{where}: {key} is {show_value(value)}; expected {expected}{hint}"


def _suggest(key: str) -> str:
    """Return a hint about the intended key, as the continuation of "is not a key"."""
    parent, _, name = key.rpartition(".")
    if len(key) > LONGEST_KEY:
        return ALL_KEYS
    if reference.schema_key(key) in TYPES:
        return f"in a file, keys are nested: `{parent}:` and below it `{name}: ...`"
    known_elsewhere = our_key(name)
    if known_elsewhere is not None and parent in ("", *reference.sections()):
        return known_elsewhere
    similar = [_with_indices_of(key, candidate) for candidate in _similar_keys(key)]
    return f"did you mean {' or '.join(similar)}?" if similar else ALL_KEYS


def _similar_keys(key: str) -> list[str]:
    """Return the most similar keys.

    In order of preference: the same name below the parent, the same name elsewhere, a similar name in the same section,
    a similar name elsewhere.
    """
    parent = reference.schema_key(key).rpartition(".")[0]
    name = key.rpartition(".")[2]
    last_parts = {known: known.rpartition(".")[2] for known in sorted(TYPES, key=lambda known: known.count("."))}
    siblings = {known: last for known, last in last_parts.items() if known.rpartition(".")[0] == parent}
    if not siblings:
        return get_close_matches(reference.schema_key(key), TYPES, n=1)

    plain = {known: last for known, last in last_parts.items() if not re.search(r"\.(N|NAME)\.", known)}
    below = [known for known, last in last_parts.items() if last == name and parent and known.startswith(f"{parent}.")]
    same = [known for known, last in plain.items() if last == name]
    least_depth = min((known.count(".") for known in same), default=0)
    similar_names = get_close_matches(name, siblings.values(), n=1)
    similar_plain = get_close_matches(name, plain.values(), n=1, cutoff=0.75)
    return (
        below
        or [known for known in same if known.count(".") == least_depth]
        or [known for known, last in siblings.items() if last in similar_names]
        or [known for known, last in plain.items() if last in similar_plain][:1]
    )


def _with_indices_of(key: str, known: str) -> str:
    """Replace `N` and `NAME` in a schema key by the index and the name at the same position of `key`."""
    parts = known.split(".")
    for i, part in enumerate(key.split(".")[: len(parts)]):
        if parts[i] in ("N", "NAME"):
            parts[i] = part
    return ".".join(parts)


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)
