"""Rules that describe keys of another trainer: the OmniZoo key, or the reason why there is none.

One table of rules per trainer drives `omnizoo convert`, the hints for unknown keys, and the migration page of the docs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

NOT_YET = "not supported yet"
NO_KEY = "no key is needed"
TWICE_THE_RANK = "(2 x rank)"  # default of `model.adapter.alpha` of some trainers
KEEP = "(unchanged)"  # in `Rule.values`: the value stays unchanged

Status = Literal["copied", "by hand", "not needed", "unsupported"]


@dataclass(frozen=True)
class Rule:
    """The counterpart of some keys of another trainer."""

    names: tuple[str, ...]  # dotted keys, or glob patterns
    status: Status
    key: str = ""  # the OmniZoo key that gets the value; `@NAME` for a value that is combined with others
    note: str = ""  # explanation of the key, or the reason why no value is copied
    values: Mapping[str, Any] = field(default_factory=dict)  # their value in lower case -> ours; None: no key is set
    convert: str = ""  # name of a conversion in `omnizoo.cli.convert.values`

    @property
    def hint(self) -> str:
        """The continuation of "KEY is not a key; "."""
        if self.status == "not needed":
            return f"{NO_KEY}: {self.note}"
        if self.status == "unsupported":
            return f"{NOT_YET}; {self.note}" if self.note else NOT_YET
        return f"use {self.replacement}"

    @property
    def replacement(self) -> str:
        """The OmniZoo key with its explanation."""
        if self.status == "by hand" or self.key.startswith("@"):
            return self.note
        return f"{self.key} ({self.note})" if self.note else self.key


@dataclass(frozen=True)
class Trainer:
    """Another trainer: its name, its rules, and its defaults where they differ from OmniZoo."""

    name: str  # value of the option `--from`
    title: str
    rules: Sequence[Rule]
    defaults: Mapping[str, Any]  # OmniZoo key -> default value of the trainer
    preference_defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults that differ with preferences
    command: str = ""  # regular expression for the trainer's command in a shell script

    def find(self, key: str) -> Rule | None:
        """Return the rule for a key. Exact names take precedence over patterns."""
        plain = key.replace("-", "_")
        for rule in self.rules:
            if plain in rule.names:
                return rule
        for rule in self.rules:
            if any("*" in name and fnmatchcase(plain, name) for name in rule.names):
                return rule
        return None


def copied(names: str, key: str, note: str = "", values: Mapping[str, Any] | None = None, convert: str = "") -> Rule:
    """Return a rule for keys whose value is copied, maybe after a conversion."""
    return Rule(tuple(names.split()), "copied", key, note, values or {}, convert)


def by_hand(names: str, note: str) -> Rule:
    """Return a rule for keys whose counterpart the user sets. The hint is "use", followed by `note`."""
    return Rule(tuple(names.split()), "by hand", note=note)


def not_needed(names: str, reason: str) -> Rule:
    """Return a rule for keys without a counterpart, because none is needed."""
    return Rule(tuple(names.split()), "not needed", note=reason)


def unsupported(names: str, advice: str = "") -> Rule:
    """Return a rule for keys that OmniZoo does not support yet."""
    return Rule(tuple(names.split()), "unsupported", note=advice)
