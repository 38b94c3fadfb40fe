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
# Locations at which validators of sections raise errors: keys, and items of lists or mappings of sections.
LOCATIONS = set(TYPES) | {key.rpartition(".")[0] for key in KEYS}

# Options of built-in losses and optimizers, by the key of their settings.
BUILT_IN_OPTIONS = {"train.losses.N": LOSSES, "optimizer": OPTIMIZERS}
OTHER_SECTION_CUTOFF = 0.85  # minimum similarity of a suggested key in another section

Loc = tuple[int | str, ...]


@dataclass(frozen=True)
class KeyOrigin:
    """The place where each key was set: the command line, or a line of the file."""

    path: str
    lines: dict[str, int]  # line number of each dotted key
    overridden: tuple[str, ...]  # keys on the command line

    def describe(self, loc: Loc) -> str:
        """Return `FILE:LINE`, `command line`, or both if overrides changed a part of the value."""
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
    # A value that matches no type of a union causes one error per type. Keep one error per key.
    details = {_cut_to_schema(detail): detail for detail in error.errors(include_url=False)}
    mistakes = []
    for loc, detail in list(details.items())[:MAX_MISTAKES]:
        mistakes.append(_explain(loc, detail, data, origin))
    return join_mistakes(mistakes, len(details))


def _cut_to_schema(detail: ErrorDetails) -> Loc:
    """Truncate the location of an error where it leaves the schema: at members of a union or items of a plain list.

    The result is empty for errors that concern the whole config, such as sections that contradict each other.
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
    key = _dotted(loc)
    schema_key = reference.schema_key(key)
    description = reference.sections().get(key) or KEYS[schema_key].description
    return f"{origin.describe(loc)}: {key} is missing; expected {TYPES.get(schema_key, '')}: {description}"


def _explain_check(loc: Loc, message: str, origin: KeyOrigin) -> str:
    """Explain an error that the validator of a section raised. Its message may start with the key."""
    first_word = message.split()[0].rstrip(":")
    key_in_message: Loc = tuple(first_word.split("."))
    if len(key_in_message) > 1 and key_in_message[0] in reference.sections():
        return f"{origin.describe(key_in_message)}: {message}"
    where = origin.describe(loc)
    return f"{where}: {message}" if len(loc) == 1 else f"{where}: {_dotted(loc)}: {message}"


def _explain_value(loc: Loc, kind: str, data: Any, origin: KeyOrigin) -> str:
    """Explain a value of the wrong type or out of range."""
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
    """Return the value at `loc`, or None if it is not in nested mappings."""
    for part in loc:
        if not isinstance(data, dict) or part not in data:
            return None
        data = data[part]
    return data


def _suggest(key: str, value: Any) -> str:
    """Return a hint about the intended key, as the continuation of "is not a key"."""
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
    """Return the key in `options` if the last part of `key` is an option of a built-in loss or optimizer."""
    parent, _, name = key.rpartition(".")
    built_in = BUILT_IN_OPTIONS.get(reference.schema_key(parent), {})
    is_option = any(name in options for options in built_in.values())
    return [f"{parent}.options.{name}"] if is_option else []


def _similar_keys(key: str) -> list[str]:
    """Return the most similar keys.

    In order of preference: the same name below the parent, the same name elsewhere, a similar name next to the key, a
    similar name in the same section, a very similar name in another section.
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

    # Keys without an index or a name are the same in every config.
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
    """Return the key with the most similar name in a section or, if it is very similar, in another section.

    Args:
        section: The section.
        name: The name to search for.
        plain: The last part of each key.
    """
    in_section = {known: last for known, last in plain.items() if known.startswith(f"{section}.")}
    for candidates, cutoff in ((in_section, 0.75), (plain, OTHER_SECTION_CUTOFF)):
        similar_names = get_close_matches(name, candidates.values(), n=1, cutoff=cutoff)
        if similar_names:
            return [known for known, last in candidates.items() if last in similar_names][:1]
    return []


def _with_indices_of(key: str, known: str) -> str:
    """Replace `N` and `NAME` in the schema key `known` with the index and the name at the same position in `key`."""
    parts = known.split(".")
    for i, part in enumerate(key.split(".")[: len(parts)]):
        if parts[i] in ("N", "NAME"):
            parts[i] = part
    return ".".join(parts)


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)
