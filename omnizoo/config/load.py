"""YAML file + `--section.key value` overrides -> a validated Config, and back to YAML.

Every mistake becomes one line that names where it is, the full key, the value, what was expected and the closest valid
key; all mistakes of a config are reported at once. Imports neither torch nor transformers, so errors come quickly.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnizoo.config import reference
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config

logger = logging.getLogger(__name__)

# Keys of earlier versions that still work, and what they are called now.
MOVED = {
    "train.betas": "optimizer.options.betas",
    "train.eps": "optimizer.options.eps",
    "train.weight_decay": "optimizer.weight_decay",
    "train.no_decay": "optimizer.no_decay",
}
COMMAND_LINE = "command line"
ALL_KEYS = "`omnizoo train --help` lists all keys"
KEYS = reference.keys()
TYPES = dict.fromkeys(reference.sections(), "mapping") | {key.key: key.type for key in KEYS}

# PyYAML reads YAML 1.1, where `1e-3` is text, `on` is true, `010` is 8 and `1:30` is 90. These are the scalars of YAML
# 1.2 instead; an integer with a leading zero stays text, so that nobody has to guess its base.
SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", list("-+0123456789")),
    "float": (
        r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}

Loc = tuple[int | str, ...]


class _Loader(yaml.SafeLoader):
    """Knows the scalars of YAML 1.2 only."""


class _Dumper(yaml.SafeDumper):
    """Knows the scalars of both versions, so it quotes every text that either would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML 6 loses unusual line breaks (U+0085, U+2028) unless they are escaped.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in SCALARS.items():
    for _dialect in (_Loader, _Dumper):
        _dialect.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of the file at `path`, changed by `overrides` (`["--train.lr", "1e-3", "--log.dir=runs/a"]`).

    Relative paths in it are relative to the working directory, whether they stand in the file or on the command line.
    """
    changes = _renamed(parse_overrides(overrides))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; the working directory is {Path.cwd()}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config file: {error}") from None
    data, lines = _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        found = "empty" if data is None else _show(data)
        raise UserError(f"{path}: the config is {found}; expected the sections {', '.join(reference.sections())}")
    _move(data, lines, str(path))
    blocked = [problem for key, value in changes.items() if (problem := _override(data, key, value))]
    if blocked:
        raise UserError("\n".join(blocked))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        # A value that fits none of the types of a union has one error for each of them: keep one per key.
        details = {_cut_to_schema(detail): detail for detail in error.errors(include_url=False)}
        origin = _Origin(str(path), lines, tuple(changes))
        raise UserError("\n".join(_explain(loc, detail, data, origin) for loc, detail in details.items())) from None


def save_config(config: Config, path: str | Path) -> None:
    """Write all keys, defaults included, so that the file means the same after a default has changed. Atomic."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: the config cannot be written: {error.strerror}") from None


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`["--train.lr", "1e-3", "--log.dir=a"]` -> `{"train.lr": 0.001, "log.dir": "a"}`; the last one of a key wins."""
    changes: dict[str, Any] = {}
    rest = iter(args)
    for arg in rest:
        flag, equals, text = arg.partition("=")
        if not flag.startswith("--"):
            raise UserError(f"{COMMAND_LINE}: unexpected argument {arg!r}; overrides are written --section.key value")
        if not equals and (text := next(rest, "--")).startswith("--"):
            raise UserError(
                f"{COMMAND_LINE}: {flag} needs a value; write {flag} VALUE, or {flag}=VALUE if it begins with --"
            )
        changes[flag[2:]], _ = _parse_yaml(text, f"{COMMAND_LINE}: {flag} {_show(text)}", flag[2:])
    return changes


def _parse_yaml(text: str, where: str, key: str = "") -> tuple[Any, dict[str, int]]:
    """The value of `text`, and the line of each dotted key in it."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = list(_index(node, key, lines, ())) if node else []
        value = loader.construct_document(node) if node and not problems else None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not key else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    if problems:
        raise UserError("\n".join(f"{where}{'' if key else f':{line}'}: {problem}" for line, problem in problems))
    return value, lines


def _index(
    node: yaml.Node, key: str, lines: dict[str, int], parents: tuple[yaml.Node, ...]
) -> Iterator[tuple[int, str]]:
    """Note the line of every key below `node`; yield (line, problem) where PyYAML would silently overwrite a key."""
    if node in parents:
        yield node.start_mark.line + 1, f"{key} contains itself through a YAML alias"
    elif isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        items = node.value if isinstance(node, yaml.MappingNode) else [(item, item) for item in node.value]
        own: dict[str, int] = {}
        for i, (name, value) in enumerate(items):
            part = str(name.value if isinstance(node, yaml.MappingNode) else i)
            full, line = f"{key}.{part}" if key else part, name.start_mark.line + 1
            if part in own:
                yield line, f"{full} is set twice, first on line {own[part]}; keep one of them"
            own[part] = lines[full] = line
            yield from _index(value, full, lines, (*parents, node))


def _override(data: dict[str, Any], key: str, value: Any) -> str | None:
    """Set the dotted `key` in `data`, making what is missing on the way; returns what stands in the way, or None."""
    place: Any = data
    parts = key.split(".")
    for depth, part in enumerate(parts, start=1):
        above, here = ".".join(parts[: depth - 1]), ".".join(parts[:depth])
        at: Any = part
        if isinstance(place, list):
            if not part.isdecimal() or int(part) > len(place):
                return (
                    f"{COMMAND_LINE}: {key}: {above} is a list; expected an index from 0 to {len(place)}, not {part!r}"
                )
            place += [None] * (int(part) == len(place))
            at = int(part)
        elif not isinstance(place, dict):
            return f"{COMMAND_LINE}: {key}: {above} is {_show(place)}; expected a mapping to set {part!r} in"
        if depth == len(parts):
            place[at] = value
        else:
            below = place[at] if isinstance(place, list) else place.get(at)
            # A copy, since a YAML alias may show the same object elsewhere.
            is_list = TYPES.get(reference.schema_key(here), "").startswith("list")
            place[at] = copy(below) if below is not None else [] if is_list else {}
            place = place[at]
    return None


def _renamed(changes: dict[str, Any]) -> dict[str, Any]:
    """Overrides under the names that keys have now."""
    renamed: dict[str, Any] = {}
    for key, value in changes.items():
        old = next((old for old in MOVED if f"{key}.".startswith(f"{old}.")), None)
        new = key if old is None else MOVED[old] + key.removeprefix(old)
        if old is not None:
            if new in changes:
                raise UserError(f"{COMMAND_LINE}: {key} is now {new}, and both are given; keep {new}")
            logger.warning("%s: %s is now %s; the old name still works", COMMAND_LINE, key, new)
        renamed[new] = value
    return renamed


def _move(data: dict[str, Any], lines: dict[str, int], path: str) -> None:
    """Put keys of the file under the names they have now."""
    for old, new in MOVED.items():
        section, name = old.split(".")
        if not isinstance(data.get(section), dict) or name not in data[section]:
            continue
        where = f"{path}:{lines[old]}" if old in lines else path
        if new in lines:
            raise UserError(f"{where}: {old} is now {new}, and both are given; keep {new}")
        data[section] = dict(data[section])  # a YAML alias may show the same object elsewhere
        if problem := _override(data, new, data[section].pop(name)):
            raise UserError(problem)
        if old in lines:
            lines[new] = lines[old]
        logger.warning("%s: %s is now %s; the old name still works", where, old, new)


@dataclass(frozen=True)
class _Origin:
    """Where a key was set: on the command line, or on a line of the file."""

    path: str
    lines: dict[str, int]
    overridden: tuple[str, ...]

    def of(self, loc: Loc) -> str:
        key = _dotted(loc)
        if any(f"{key}.".startswith(f"{changed}.") for changed in self.overridden):
            return COMMAND_LINE
        line = next((f":{self.lines[k]}" for n in range(len(loc), 0, -1) if (k := _dotted(loc[:n])) in self.lines), "")
        partly = any(changed.startswith(f"{key}.") for changed in self.overridden)
        return f"{self.path}{line}" + (f" and {COMMAND_LINE}" if partly else "")


def _cut_to_schema(detail: ErrorDetails) -> Loc:
    """The location of an error, cut where it leaves the schema: members of a union, items of a list of plain values."""
    loc = detail["loc"]
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return loc
    return next(loc[:n] for n in range(len(loc), 0, -1) if reference.schema_key(_dotted(loc[:n])) in TYPES)


def _explain(loc: Loc, detail: ErrorDetails, data: Any, origin: _Origin) -> str:
    key, where = _dotted(loc), origin.of(loc)
    expected = TYPES.get(reference.schema_key(key), "")
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            # `--trian.steps 3` makes a section `trian`: speak of the key as it was typed.
            typed = next((changed for changed in origin.overridden if changed.startswith(f"{key}.")), None)
            where = COMMAND_LINE if typed else where
            return f"{where}: {typed or key} is not a key; {_suggest(typed or key)}"
        case "missing" if loc == detail["loc"]:
            known = reference.schema_key(key)
            about = reference.sections().get(key) or next(k.description for k in KEYS if k.key == known)
            return f"{where}: {key} is missing; expected {expected}: {about}"
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            named = tuple(message.split()[0].rstrip(":").split("."))  # the key, where the message begins with it
            if len(named) > 1 and named[0] in reference.sections():
                return f"{origin.of(named)}: {message}"
            return f"{where}: {message}" if len(loc) == 1 else f"{where}: {key}: {message}"
    for part in loc:
        data = data[part]
    quotes = "; put it in quotes" + (", '\"...\"'" if where == COMMAND_LINE else "")
    unquoted = expected.startswith("text") and isinstance(data, int | float)
    return f"{where}: {key} is {_show(data)}; expected {expected}{quotes if unquoted else ''}"


def _suggest(key: str) -> str:
    """Which valid key was probably meant: the same name below or elsewhere, a similar one here, or elsewhere."""
    parent, _, name = key.rpartition(".")
    known, above = reference.schema_key(key), reference.schema_key(parent)
    if known in TYPES:
        return f"in a file, keys are nested: `{parent}:` and below it `{name}: ...`"
    names = {key: key.rpartition(".")[2] for key in sorted(TYPES, key=lambda key: key.count("."))}
    if siblings := {full: last for full, last in names.items() if full.rpartition(".")[0] == above}:
        plain = {full: last for full, last in names.items() if not re.search(r"\.(N|NAME)\.", full)}
        depth = min((full.count(".") for full in plain if plain[full] == name), default=0)
        similar = get_close_matches(name, plain.values(), n=1, cutoff=0.75)
        close = get_close_matches(name, siblings.values(), n=1)
        meant = (
            [full for full in names if names[full] == name and above and full.startswith(f"{above}.")]
            or [full for full in plain if plain[full] == name and full.count(".") == depth]
            or [full for full in siblings if siblings[full] in close]
            or [full for full in plain if plain[full] in similar][:1]
        )
    else:
        meant = get_close_matches(known, TYPES, n=1)
    return f"did you mean {' or '.join(_filled(m, key) for m in meant)}?" if meant else ALL_KEYS


def _filled(known: str, key: str) -> str:
    """A key of the tables with the indices and names of `key` in their places."""
    typed = key.split(".")
    parts = enumerate(known.split("."))
    return ".".join(typed[i] if part in ("N", "NAME") and i < len(typed) else part for i, part in parts)


def _dotted(loc: Loc) -> str:
    return ".".join(str(part) for part in loc)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
