"""Convert validation errors of pydantic to messages of one line each.

A message states where the key was set, its value and the expected type. For an unknown key, it suggests a valid one.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnizoo.config import reference
from omnizoo.config.errors import MAX_MISTAKES, join_mistakes, shorten, show_value
from omnizoo.config.foreign.lookup import hint_for
from omnizoo.config.moved_keys import moved_key
from omnizoo.config.sections.base import MAX_TEXT_LENGTH
from omnizoo.config.sections.loss_options import LOSSES
from omnizoo.config.sections.optimizer_options import OPTIMIZERS

COMMAND_LINE = "command line"
MAX_KEY_LENGTH = 200  # characters; longer keys get no suggestion
KEYS = {key.key: key for key in reference.all_keys()}
TYPES = dict.fromkeys(reference.sections(), "mapping") | {name: key.type for name, key in KEYS.items()}
# Schema keys for which a validator may report an error: all keys, and the mappings that contain keys.
LOCATIONS = set(TYPES) | {key.rpartition(".")[0] for key in KEYS}

# Options of the built-in losses and optimizers, keyed by the schema key of the settings that contain `options`.
BUILT_IN_OPTIONS = {"train.losses.N": LOSSES, "optimizer": OPTIMIZERS}
OTHER_SECTION_CUTOFF = 0.85  # minimum similarity of a suggested key in another section

Loc = tuple[int | str, ...]  # path of a value in the config, such as ("data", "sources", 0, "path")


@dataclass(frozen=True)
class KeyOrigin:
    """The place where each key of a config was set: a line of the file, or the command line."""

    path: str
    lines: dict[str, int]  # line number of each dotted key in the file
    overridden: tuple[str, ...]  # dotted keys on the command line

    def describe(self, loc: Loc) -> str:
        """Return `FILE:LINE`, `command line`, or both if the command line changed only a part of the value."""
        key = _dotted(loc)
        if any(f"{key}.".startswith(f"{changed}.") for changed in self.overridden):
            return COMMAND_LINE
        is_partly_overridden = any(changed.startswith(f"{key}.") for changed in self.overridden)
        suffix = f" and {COMMAND_LINE}" if is_partly_overridden else ""
        return f"{self.path}{self._line(loc)}{suffix}"

    def _line(self, loc: Loc) -> str:
        """Return `:LINE` of the key, or of its closest parent in the file; empty if the file contains neither."""
        for length in range(len(loc), 0, -1):
            key = _dotted(loc[:length])
            if key in self.lines:
                return f":{self.lines[key]}"
        return ""

    def typed_key(self, key: str) -> str | None:
        """Return the first key on the command line that is inside `key`; None if there is none.

        For example, `--trian.steps 3` creates the unknown section `trian`, and the message should quote `trian.steps`.
        """
        return next((changed for changed in self.overridden if changed.startswith(f"{key}.")), None)


def explain(error: ValidationError, data: Any, origin: KeyOrigin) -> str:
    """Return an error message with one line for each mistake in a config.

    Args:
        error: The error from the validation of `data`.
        data: The values of the config, before validation.
        origin: Where each key was set.
    """
    # A value that matches no type of a union causes one error for each type. Keep one error for each key.
    details = {_cut_to_schema(detail): detail for detail in error.errors(include_url=False)}
    mistakes = []
    for loc, detail in list(details.items())[:MAX_MISTAKES]:
        mistakes.append(_explain(loc, detail, data, origin))
    return join_mistakes(mistakes, len(details))


def _cut_to_schema(detail: ErrorDetails) -> Loc:
    """Return the part of an error's location that is a key of the schema.

    Pydantic also reports union members and indices in lists of plain values. These are not keys. The result
    is empty for errors that concern the whole config, such as sections that contradict each other.
    """
    loc = detail["loc"]
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return loc
    locations = LOCATIONS if detail["type"] == "value_error" else TYPES
    for length in range(len(loc), 0, -1):
        if reference.schema_key(_dotted(loc[:length])) in locations:
            return loc[:length]
    return ()


def _explain(loc: Loc, detail: ErrorDetails, data: Any, origin: KeyOrigin) -> str:
    """Return the message for one mistake."""
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            return _explain_unknown(loc, data, origin)
        case "missing" if loc == detail["loc"]:
            return _explain_missing(loc, origin)
        case "value_error":
            return _explain_check(loc, detail["msg"].removeprefix("Value error, "), origin)
        case kind:
            return _explain_value(loc, kind, data, origin)


def _explain_unknown(loc: Loc, data: Any, origin: KeyOrigin) -> str:
    """Explain a key that is not in the schema. Suggest its new name, our equivalent of it, or a similar key."""
    key = _dotted(loc)
    typed_key = origin.typed_key(key)
    where = COMMAND_LINE if typed_key else origin.describe(loc)
    key = typed_key or key
    if (moved := moved_key(key)) is not None:
        return f"{where}: {moved}"
    return f"{where}: {shorten(key)} is not a key; {_suggest(key, _value_at(loc, data))}"


def _explain_missing(loc: Loc, origin: KeyOrigin) -> str:
    """Explain that a required key is missing, with its type and description."""
    key = _dotted(loc)
    schema_key = reference.schema_key(key)
    description = reference.sections().get(key) or KEYS[schema_key].description
    return f"{origin.describe(loc)}: {key} is missing; expected {TYPES.get(schema_key, '')}: {description}"


def _explain_check(loc: Loc, message: str, origin: KeyOrigin) -> str:
    """Explain an error that a validator of a section raised. Add the key, unless the message starts with a key."""
    first_word = message.split()[0].rstrip(":")
    key_in_message: Loc = tuple(first_word.split("."))
    if len(key_in_message) > 1 and key_in_message[0] in reference.sections():
        return f"{origin.describe(key_in_message)}: {message}"
    where = origin.describe(loc)
    return f"{where}: {message}" if len(loc) == 1 else f"{where}: {_dotted(loc)}: {message}"


def _explain_value(loc: Loc, kind: str, data: Any, origin: KeyOrigin) -> str:
    """Explain a value that has the wrong type or is out of range."""
    key = _dotted(loc)
    where = origin.describe(loc)
    expected = TYPES.get(reference.schema_key(key), "")
    value = data
    for part in loc:
        value = value[part]

    if kind == "string_too_short":
        return f"{where}: {key} is empty; expected {expected}"
    if kind == "string_too_long":
        return f"{where}: {key} has {len(value):,} characters; expected at most {MAX_TEXT_LENGTH:,}"
    hint = ""
    if expected.startswith("text") and isinstance(value, int | float):
        hint = "; put it in quotes, '\"...\"'" if where == COMMAND_LINE else "; put it in quotes"
    return f"{where}: {key} is {show_value(value)}; expected {expected}{hint}"


def _value_at(loc: Loc, data: Any) -> Any:
    """Return the value at `loc`; None if the path leaves the nested mappings."""
    for part in loc:
        if not isinstance(data, dict) or part not in data:
            return None
        data = data[part]
    return data


def _suggest(key: str, value: Any) -> str:
    """Return a hint about the key that the user may have meant, to be appended to "... is not a key; "."""
    parent, _, name = key.rpartition(".")
    section = key.partition(".")[0]
    keys_help = "`omnizoo train --help` lists the sections"
    if section in reference.sections():
        keys_help = f"`omnizoo train --help {section}` lists its keys"
    if len(key) > MAX_KEY_LENGTH:
        return keys_help
    if reference.schema_key(key) in TYPES:
        return f"in a file, keys are nested: `{parent}:` and below it `{name}: ...`"
    replacement = hint_for(key, value)
    if replacement is not None:
        return replacement
    similar = _options_named(key) or [_with_indices_of(key, candidate) for candidate in _similar_keys(key)]
    return f"did you mean {' or '.join(similar)}?" if similar else keys_help


def _options_named(key: str) -> list[str]:
    """Return the key inside `options`, if the last part of `key` is an option of a built-in loss or optimizer.

    For example, `optimizer.eps` gives `optimizer.options.eps`. The list is empty for other keys.
    """
    parent, _, name = key.rpartition(".")
    built_in = BUILT_IN_OPTIONS.get(reference.schema_key(parent), {})
    is_option = any(name in options for options in built_in.values())
    return [f"{parent}.options.{name}"] if is_option else []


def _similar_keys(key: str) -> list[str]:
    """Return the valid keys that are most similar to `key`; empty if none is similar.

    The first of these rules that finds a key applies:

    1. Keys with the same last part, inside the parent of `key`.
    2. Keys with the same last part elsewhere, at the smallest depth.
    3. Keys next to `key` with a similar last part.
    4. A key in the same section with a similar last part.
    5. A key in another section with a very similar last part.

    If the parent of `key` is not in the schema, the valid key that is most similar as a whole is returned.
    """
    parent = reference.schema_key(key).rpartition(".")[0]
    name = key.rpartition(".")[2]
    by_depth = sorted(TYPES, key=lambda known: known.count("."))
    last_parts = {known: known.rpartition(".")[2] for known in by_depth}
    siblings = {known: last for known, last in last_parts.items() if known.rpartition(".")[0] == parent}
    if not siblings:
        return get_close_matches(reference.schema_key(key), TYPES, n=1)

    same_name = [known for known, last in last_parts.items() if last == name]
    below_parent = [known for known in same_name if parent and known.startswith(f"{parent}.")]
    if below_parent:
        return below_parent

    # Suggest only keys without an index or a name of the user, because these are the same in every config.
    plain = {known: last for known, last in last_parts.items() if not re.search(r"\.(N|NAME)\.", known)}
    same_plain = [known for known in same_name if known in plain]
    if same_plain:
        least_depth = min(known.count(".") for known in same_plain)
        return [known for known in same_plain if known.count(".") == least_depth]

    similar_names = get_close_matches(name, siblings.values(), n=1)
    similar_siblings = [known for known, last in siblings.items() if last in similar_names]
    if similar_siblings:
        return similar_siblings
    return _similar_name(key.partition(".")[0], name, plain)


def _similar_name(section: str, name: str, plain: dict[str, str]) -> list[str]:
    """Return the key whose last part is most similar to `name`; empty if none is similar.

    Args:
        section: The section to search first. In other sections, the name must be very similar.
        name: The name to search for.
        plain: Candidate keys, with the last part of each.
    """
    in_section = {known: last for known, last in plain.items() if known.startswith(f"{section}.")}
    for candidates, cutoff in ((in_section, 0.75), (plain, OTHER_SECTION_CUTOFF)):
        similar_names = get_close_matches(name, candidates.values(), n=1, cutoff=cutoff)
        if similar_names:
            return [known for known, last in candidates.items() if last in similar_names][:1]
    return []


def _with_indices_of(key: str, known: str) -> str:
    """Fill in `N` and `NAME` of the schema key `known` with the parts at the same positions of `key`."""
    parts = known.split(".")
    for i, part in enumerate(key.split(".")[: len(parts)]):
        if parts[i] in ("N", "NAME"):
            parts[i] = part
    return ".".join(parts)


def _dotted(loc: Loc) -> str:
    """Return a path as a dotted key, such as `data.sources.0.path`."""
    return ".".join(str(part) for part in loc)
