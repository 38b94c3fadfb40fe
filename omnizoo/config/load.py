"""YAML file + `--section.key value` overrides -> a validated Config, and back to YAML.

Every mistake becomes one line that names where it is, the full key, the value, what was expected and the closest valid
key; all mistakes of a config are reported at once. Imports neither torch nor transformers, so errors come quickly.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnizoo.config import reference
from omnizoo.config.errors import UserError
from omnizoo.config.other_tools import here
from omnizoo.config.schema import Config
from omnizoo.config.section import LONGEST_TEXT, Given

logger = logging.getLogger(__name__)

# Keys of earlier versions that still work, and what they are called now.
MOVED = {
    "train.betas": "optimizer.options.betas",
    "train.eps": "optimizer.options.eps",
    "train.weight_decay": "optimizer.weight_decay",
    "train.no_decay": "optimizer.no_decay",
    "train.router_bias_rate": "router.bias_rate",
}
# Weights of losses that were keys of their own: now items of train.losses, of this kind.
LISTED = {"train.balance_loss": "balance", "train.router_z_loss": "router_z"}
COMMAND_LINE = "command line"
NO_DATA = "(none)"
IN_PYTHON = "config"
# Arguments of `omnizoo.train`: section and key that take the object, and keys that would say the same.
GIVEN = {
    "model": ("model", "given", ("path", "config", "module", "foundation")),
    "tokenizer": ("model", "tokenizer", ("tokenizer",)),
    "data": ("data", "sources", ("sources",)),
    "eval_data": ("data", "eval_sources", ("eval_sources",)),
}
ALL_KEYS = "`omnizoo train --help` lists all keys"
KEYS = reference.keys()
# No config comes near these; what does was not meant as one, or is there to take time and memory.
MOST_BYTES, MOST_VALUES, MOST_DEPTH, MOST_MISTAKES = 2**19, 20_000, 64, 20
LONGEST_NUMBER = 400  # digits
TYPES = dict.fromkeys(reference.sections(), "mapping") | {key.key: key.type for key in KEYS}
# What a section may find wrong with itself: keys, and items of lists and mappings of sections.
PLACES = set(TYPES) | {key.key.rpartition(".")[0] for key in KEYS}

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

TAGS = {f"tag:yaml.org,2002:{name}" for name in (*SCALARS, "str", "seq", "map")}

OPENING = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)

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


def load_config(
    config: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    notices: bool = True,
    objects: Mapping[str, Any] | None = None,
    needs_data: bool = True,
) -> Config:
    """The config of a file or a mapping, changed by `overrides` (`["--train.lr", "1e-3", "--log.dir=runs/a"]`).

    Where no data are needed, `data.sources` may be left out: there is then one source with the path NO_DATA.

    Relative paths in it are relative to the working directory, whether they stand in the file or on the command line.
    `objects` are those of `omnizoo.train`, by the names of its arguments; they take the place of what files name.
    """
    say = logger.warning if notices else logger.debug  # of several ranks, one says it
    changes = _renamed(parse_overrides(overrides), say)
    data, lines, path = _read(config)
    if not isinstance(data, dict):
        found = "empty" if data is None else _show(data)
        raise UserError(f"{path}: the config is {found}; expected the sections {', '.join(reference.sections())}")
    _move(data, lines, path, say)
    for argument, value in (objects or {}).items():
        if value is not None:
            _give(data, argument, value, path)
    blocked = [problem for key, value in changes.items() if (problem := _override(data, key, value))]
    if blocked:
        raise UserError(_list(blocked, len(blocked)))
    if not needs_data and isinstance(section := data.setdefault("data", {}), dict):
        section.setdefault("sources", [{"path": NO_DATA}])
    origin = _Origin(str(path), lines, tuple(changes) + _list_losses(data, lines, changes, str(path), say))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        # A value that fits none of the types of a union has one error for each of them: keep one per key.
        details = {_cut_to_schema(detail): detail for detail in error.errors(include_url=False)}
        some = list(details.items())[:MOST_MISTAKES]
        raise UserError(_list((_explain(loc, detail, data, origin) for loc, detail in some), len(details))) from None


def _read(config: str | Path | Mapping[str, Any] | Config) -> tuple[Any, dict[str, int], str]:
    """The values of a config, the line of each key, and what to call it in messages."""
    if isinstance(config, Config):
        return config.model_dump(), {}, IN_PYTHON
    if isinstance(config, Mapping):
        return _copied(config), {}, IN_PYTHON
    if not isinstance(config, str | Path):
        kind = type(config).__name__
        raise UserError(f"{IN_PYTHON} is a {kind}; expected the path of a YAML file, a mapping or a Config")
    return (*_parse_yaml(_read_text(config), str(config)), str(config))


def _copied(value: Any) -> Any:
    """Mappings and lists anew, whatever is in them as it is: a config of the user's own is not changed."""
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _give(data: dict[str, Any], argument: str, value: Any, path: str) -> None:
    """Put an object of `omnizoo.train` where the config has what it stands for; a config that has both is refused."""
    section, key, rivals = GIVEN[argument]
    values = data.setdefault(section, {})
    if not isinstance(values, dict):
        return  # which is a mistake of its own
    for rival in rivals:
        named = values.get(rival)
        if isinstance(named, list):
            named = [part for part in named if not (isinstance(part, dict) and part.get("given"))]
        if named:
            raise UserError(f"{path}: {section}.{rival} is set, and {argument}= was given to train; keep one of them")
    name = type(value).__qualname__
    given = Given(value, name if argument == "model" else f"{argument}= ({name})")
    values[key] = [{"given": given}] if key.endswith("sources") else given


def _read_text(path: str | Path) -> str:
    """The text of an ordinary file of a size that configs have; anything else may block, or never end."""
    if not str(path):
        raise UserError("the name of the config file is empty")
    try:
        about = os.stat(path)
        if not S_ISREG(about.st_mode):
            kind = "a folder" if S_ISDIR(about.st_mode) else "not an ordinary file"
            raise UserError(f"{path}: cannot be read as a config file: it is {kind}")
        if about.st_size > MOST_BYTES:
            raise UserError(f"{path}: has {about.st_size:,} bytes; a config file has at most {MOST_BYTES:,}")
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; the working directory is {Path.cwd()}") from None
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as a config file: not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a config file: {error.strerror}") from None
    except ValueError as error:  # a NUL in its name
        raise UserError(f"{path}: is no name of a config file: {error}") from None


def _list(mistakes: Iterable[str], count: int) -> str:
    """One line for each mistake; those of a file with more than a person reads are counted."""
    shown = [_printable(mistake) for mistake in mistakes]
    more = [f"and {count - len(shown):,} more mistakes"] if count > len(shown) else []
    return "\n".join([*shown, *more])


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
            shown = _printable(repr(arg))
            raise UserError(f"{COMMAND_LINE}: unexpected argument {shown}; overrides are written --section.key value")
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
        _check_depth(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = list(islice(_index(node, key, lines, ()), MOST_MISTAKES)) if node else []
        value = loader.construct_document(node) if node and not problems else None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not key else ""
        raise UserError(_printable(f"{where}{line}: not valid YAML: {error.problem}")) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(_printable(f"{where}: not valid YAML: {' '.join(str(error).split())}")) from None
    if problems:
        mistakes = [f"{where}{'' if key else f':{line}'}: {problem}" for line, problem in problems]
        raise UserError(_list(mistakes, len(mistakes)))
    return value, lines


def _check_depth(text: str) -> None:
    """PyYAML takes time by the square of the depth, and then the interpreter's stack: its tokens are counted first."""
    depth = 0
    for token in yaml.scan(text, _Loader):
        if isinstance(token, OPENING):
            depth += 1
        elif isinstance(token, CLOSING):
            depth -= 1
        if depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MOST_DEPTH} deep", problem_mark=token.start_mark)


def _index(
    node: yaml.Node, key: str, lines: dict[str, int], parents: tuple[yaml.Node, ...]
) -> Iterator[tuple[int, str]]:
    """Note the line of every key below `node`; yield (line, problem) for what YAML allows and a config does not."""
    at = node.start_mark.line + 1
    if node in parents:
        yield at, f"{key} contains itself through a YAML alias"
        return
    if len(parents) > MOST_DEPTH:  # through aliases, which the text does not show
        raise yaml.MarkedYAMLError(problem=f"nested more than {MOST_DEPTH} deep", problem_mark=node.start_mark)
    if len(lines) > MOST_VALUES:
        reason = f"more than {MOST_VALUES:,} values; do YAML aliases multiply them?"
        raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark)
    if node.tag not in TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        yield at, f"{key} has the YAML tag {_short(tag)}, which has no meaning in a config; leave it out"
    elif isinstance(node, yaml.ScalarNode):
        if problem := _unreadable(node):
            yield at, f"{key} {problem}"
    else:
        is_mapping = isinstance(node, yaml.MappingNode)
        items = node.value if is_mapping else [(item, item) for item in node.value]
        own: dict[str, int] = {}
        for i, (name, value) in enumerate(items):
            line = name.start_mark.line + 1
            if is_mapping and not isinstance(name, yaml.ScalarNode):
                yield line, f"{key}: a list or a mapping cannot be a key".removeprefix(": ")
                continue
            part = str(name.value) if is_mapping else str(i)
            full = f"{key}.{part}" if key else part
            if is_mapping and (problem := _unreadable(name)):
                yield line, f"the key {_show(full)} {problem}"
            if part in own:
                yield line, f"{full} is set twice, first on line {own[part]}; keep one of them"
            own[part] = lines[full] = line
            yield from _index(value, full, lines, (*parents, node))


def _unreadable(node: yaml.ScalarNode) -> str | None:
    """What makes a value unusable wherever it stands: no file name can have these characters, nor can text in UTF-8."""
    text = str(node.value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "has a character in it that text cannot have (NUL, or half of a surrogate pair)"
    if len(text) > LONGEST_NUMBER and node.tag.endswith((":int", ":float")):
        return f"is a number of {len(text):,} digits; expected at most {LONGEST_NUMBER}"
    return None


def _override(data: dict[str, Any], key: str, value: Any) -> str | None:
    """Set the dotted `key` in `data`, making what is missing on the way; returns what stands in the way, or None."""
    place: Any = data
    parts = key.split(".")
    if len(parts) > MOST_DEPTH:
        return f"{COMMAND_LINE}: {_short(key)} is nested more than {MOST_DEPTH} deep"
    for depth, part in enumerate(parts, start=1):
        above, here = ".".join(parts[: depth - 1]), ".".join(parts[:depth])
        at: Any = part
        if isinstance(place, list):
            if not re.fullmatch("[0-9]{1,6}", part) or int(part) > len(place):
                return (
                    f"{COMMAND_LINE}: {_short(key)}: {above} is a list; expected an index from 0 to {len(place)}, "
                    f"not {_show(part)}"
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


def _renamed(changes: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """Overrides under the names that keys have now."""
    renamed: dict[str, Any] = {}
    for key, value in changes.items():
        old = next((old for old in MOVED if f"{key}.".startswith(f"{old}.")), None)
        new = key if old is None else MOVED[old] + key.removeprefix(old)
        if old is not None:
            if new in changes:
                raise UserError(f"{COMMAND_LINE}: {key} is now {new}, and both are given; keep {new}")
            say("%s: %s is now %s; the old name still works", COMMAND_LINE, key, new)
        renamed[new] = value
    return renamed


def _move(data: dict[str, Any], lines: dict[str, int], path: str, say: Callable[..., None]) -> None:
    """Put keys of the file under the names they have now."""
    for old, new in MOVED.items():
        section, name = old.split(".")
        if not isinstance(data.get(section), dict) or name not in data[section]:
            continue
        where = f"{path}:{lines[old]}" if old in lines else path
        if _holds(data, new):
            raise UserError(f"{where}: {old} is now {new}, and both are given; keep {new}")
        data[section] = dict(data[section])  # a YAML alias may show the same object elsewhere
        if problem := _override(data, new, data[section].pop(name)):
            raise UserError(problem.replace(COMMAND_LINE, where, 1))
        if old in lines:
            lines[new] = lines[old]
        say("%s: %s is now %s; the old name still works", where, old, new)


def _list_losses(
    data: dict[str, Any], lines: dict[str, int], changes: Collection[str], path: str, say: Callable[..., None]
) -> tuple[str, ...]:
    """Make items of train.losses out of the keys that losses had; returns those items that the command line sets.

    A weight of 0 said that there is no such loss, as configs with all of their defaults in them still do.
    """
    train = data.get("train")
    given = [old for old in LISTED if isinstance(train, dict) and old.partition(".")[2] in train]
    if not given:
        return ()
    train = data["train"] = dict(data["train"])  # a YAML alias may show the same object elsewhere
    losses: list[Any] = [{"kind": "cross_entropy"}]
    moved: dict[str, str] = {}
    for old in given:
        weight = train.pop(old.partition(".")[2])
        if isinstance(weight, int | float) and not isinstance(weight, bool) and weight == 0:
            continue
        where = COMMAND_LINE if old in changes else f"{path}:{lines[old]}" if old in lines else path
        if "losses" in train:
            raise UserError(f"{where}: {old} is now an item of train.losses, and both are given; keep train.losses")
        moved[old] = f"train.losses.{len(losses)}"
        losses.append({"kind": LISTED[old], "weight": weight})
        if where != COMMAND_LINE and old in lines:
            lines[moved[old]] = lines[old]
    if moved:
        train["losses"] = losses
        items = ", ".join(f"{{kind: {loss['kind']}, weight: {_show(loss['weight'])}}}" for loss in losses[1:])
        now = f"train.losses: [{{kind: cross_entropy}}, {items}]"
        say("%s: %s is now %s; the old way still works", path, " and ".join(moved), now)
    return tuple(new for old, new in moved.items() if old in changes)


def _holds(data: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


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
    """The location of an error, cut where it leaves the schema: members of a union, items of a list of plain values.

    Empty: of the config as a whole, where sections contradict each other.
    """
    loc = detail["loc"]
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return loc
    places = PLACES if detail["type"] == "value_error" else TYPES
    return next((loc[:n] for n in range(len(loc), 0, -1) if reference.schema_key(_dotted(loc[:n])) in places), ())


def _explain(loc: Loc, detail: ErrorDetails, data: Any, origin: _Origin) -> str:
    key, where = _dotted(loc), origin.of(loc)
    expected = TYPES.get(reference.schema_key(key), "")
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            # `--trian.steps 3` makes a section `trian`: speak of the key as it was typed.
            typed = next((changed for changed in origin.overridden if changed.startswith(f"{key}.")), None)
            where = COMMAND_LINE if typed else where
            return f"{where}: {_short(typed or key)} is not a key; {_suggest(typed or key)}"
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
    if detail["type"] == "string_too_short":
        return f"{where}: {key} is empty; expected {expected}"
    if detail["type"] == "string_too_long":
        return f"{where}: {key} is a text of {len(data):,} characters; at most {LONGEST_TEXT:,} are possible"
    quotes = "; put it in quotes" + (", '\"...\"'" if where == COMMAND_LINE else "")
    unquoted = expected.startswith("text") and isinstance(data, int | float)
    return f"{where}: {key} is {_show(data)}; expected {expected}{quotes if unquoted else ''}"


def _suggest(key: str) -> str:
    """Which valid key was probably meant: the same name below or elsewhere, a similar one here, or elsewhere."""
    parent, _, name = key.rpartition(".")
    if len(key) > 200:  # nothing looks like it
        return ALL_KEYS
    known, above = reference.schema_key(key), reference.schema_key(parent)
    if known in TYPES:
        return f"in a file, keys are nested: `{parent}:` and below it `{name}: ...`"
    if (said := here(name)) is not None and parent in ("", *reference.sections()):
        return said
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
    return _short(_printable(json.dumps(value, ensure_ascii=False, default=str)))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _printable(text: str) -> str:
    """Line breaks, escape sequences and the like as `\\x1b`: a mistake is one line, whatever the mistake is."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
