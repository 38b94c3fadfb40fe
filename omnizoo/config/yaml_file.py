"""Read and write config files in YAML.

Numbers and booleans follow YAML 1.2. The size and depth of documents is limited, and the parser returns the line number
of every key for error messages.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import yaml

from omnizoo.config.errors import MAX_MISTAKES, UserError, join_mistakes, printable, shorten, show_value
from omnizoo.config.schema import Config

# These limits bound the time and memory that a malicious file can use. Real configs are far below them.
MAX_BYTES = 2**19
MAX_VALUES = 20_000
MAX_DEPTH = 64
MAX_DIGITS = 400  # maximum length of a number

# PyYAML implements YAML 1.1, where `1e-3` is text, `on` is true, `010` is 8 and `1:30` is 90. This table defines the
# scalars of YAML 1.2 instead: for each type, a pattern and the characters it can begin with. Unlike in YAML 1.2, an
# integer with a leading zero stays text, because its base is ambiguous.
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
TAG_PREFIX = "tag:yaml.org,2002:"
TAGS = {TAG_PREFIX + name for name in (*SCALARS, "str", "seq", "map")}

Problem = tuple[int, str]  # line number and error message


class YamlLoader(yaml.SafeLoader):
    """Loader that recognizes only the scalars in `SCALARS`, and rejects documents that are nested too deeply.

    PyYAML's running time is quadratic in the depth, and building deep documents exceeds Python's recursion limit.
    """

    depth = 0

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        with self._nested():
            return super().compose_sequence_node(anchor)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        with self._nested():
            return super().compose_mapping_node(anchor)

    @contextmanager
    def _nested(self) -> Iterator[None]:
        """Context manager: count one more level while a collection is parsed. Raises an error beyond `MAX_DEPTH`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _too_deep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        yield
        self.depth -= 1


class YamlDumper(yaml.SafeDumper):
    """Dumper that quotes every text that YAML 1.1 or 1.2 would parse as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that repeated values are written in full instead of as YAML aliases."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Write a text with unprintable characters in double quotes, and other texts in the default style."""
        # PyYAML 6 loses unusual line breaks (U+0085, U+2028) unless they are escaped.
        return self.represent_scalar(f"{TAG_PREFIX}str", data, style=None if data.isprintable() else '"')


YamlDumper.add_representer(str, YamlDumper.represent_str)
YamlLoader.yaml_implicit_resolvers = {}
for _name, (_pattern, _first_characters) in SCALARS.items():
    for _dialect in (YamlLoader, YamlDumper):
        _dialect.add_implicit_resolver(TAG_PREFIX + _name, re.compile(f"^(?:{_pattern})$"), _first_characters)


def read_text(path: str | Path) -> str:
    """Return the text of a config file.

    Only regular files are accepted, because reading a pipe or a device may never end.

    Raises:
        UserError: If the file is missing, not a regular file, not UTF-8, or larger than `MAX_BYTES`.
    """
    if not str(path):
        raise UserError("config file: the name is empty. Pass the path of a YAML file.")
    try:
        _check_file(path)
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file; the working directory is {Path.cwd()}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as a config file: not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a config file: {error.strerror}") from None
    except ValueError as error:  # the name contains a NUL character
        raise UserError(f"{path}: not a valid name of a config file: {error}") from None


def _check_file(path: str | Path) -> None:
    """Raise `UserError` if `path` is not a regular file or is too large."""
    status = os.stat(path)
    if not S_ISREG(status.st_mode):
        kind = "a folder" if S_ISDIR(status.st_mode) else "not a regular file"
        raise UserError(f"{path}: {kind}; expected a YAML file")
    if status.st_size > MAX_BYTES:
        raise UserError(f"{path}: the file has {status.st_size:,} bytes; a config file can have at most {MAX_BYTES:,}")


def save_config(config: Config, path: str | Path) -> None:
    """Write a config file atomically.

    All keys are written, even if they have default values, so that a later change of a default does not affect the
    saved config.

    Raises:
        UserError: If the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    text = yaml.dump(config.model_dump(), Dumper=YamlDumper, sort_keys=False, allow_unicode=True, width=120)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write the config: {error.strerror}") from None


def parse_yaml(text: str, where: str, key: str = "") -> tuple[Any, dict[str, int]]:
    """Parse a YAML document, or the value of one config key.

    Args:
        text: The YAML text.
        where: Where the text comes from, for error messages.
        key: The dotted key whose value is `text`; empty for a whole document.

    Returns:
        The value, and the line number of each dotted key in it.

    Raises:
        UserError: If the text is not valid YAML, or contains something that a config must not contain.
    """
    lines: dict[str, int] = {}
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        problems: list[Problem] = []
        value = None
        if node:
            problems = list(islice(_index_node(node, key, lines, ()), MAX_MISTAKES))
        if node and not problems:
            value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark and not key else ""
        raise UserError(printable(f"{where}{line}: not valid YAML: {error.problem}")) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(printable(f"{where}: not valid YAML: {' '.join(str(error).split())}")) from None

    if problems:
        # A value on the command line has no line number.
        mistakes = [f"{where}: {message}" if key else f"{where}:{line}: {message}" for line, message in problems]
        raise UserError(join_mistakes(mistakes))
    return value, lines


def _too_deep(mark: yaml.Mark) -> yaml.MarkedYAMLError:
    """Return the error for a document that is nested too deeply."""
    return yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels of nesting", problem_mark=mark)


def _index_node(node: yaml.Node, key: str, lines: dict[str, int], parents: tuple[yaml.Node, ...]) -> Iterator[Problem]:
    """Record the line of every key inside `node`, and yield problems: valid YAML that a config must not contain.

    This is a generator because YAML aliases can multiply the problems of a small file, and the caller needs only the
    first ones.

    Args:
        node: A node of the document.
        key: Dotted key of the node.
        lines: Receives the line number of each dotted key.
        parents: The nodes that contain `node`, to find aliases that contain themselves.

    Yields:
        The line number and the message of each problem.
    """
    line = _line_of(node)
    if node in parents:
        yield line, f"{key} contains itself through a YAML alias"
        return
    if len(parents) > MAX_DEPTH:  # nesting by aliases; the loader does not follow aliases
        raise _too_deep(node.start_mark)
    if len(lines) > MAX_VALUES:
        reason = f"more than {MAX_VALUES:,} values, with YAML aliases expanded"
        raise yaml.MarkedYAMLError(problem=reason, problem_mark=node.start_mark)

    if node.tag not in TAGS:
        tag = node.tag.replace(TAG_PREFIX, "!!")
        yield line, f"{key} has the YAML tag {shorten(tag)}; remove the tag, because configs have no tags"
    elif isinstance(node, yaml.MappingNode):
        yield from _index_mapping(node, key, lines, (*parents, node))
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            item_key = _join(key, str(i))
            lines[item_key] = _line_of(item)
            yield from _index_node(item, item_key, lines, (*parents, node))
    elif problem := _scalar_problem(node):
        yield line, f"{key} {problem}"


def _index_mapping(
    node: yaml.MappingNode, key: str, lines: dict[str, int], parents: tuple[yaml.Node, ...]
) -> Iterator[Problem]:
    """Record the lines of a mapping's keys, and yield problems of the keys and of their values."""
    first_lines: dict[str, int] = {}
    for name_node, value in node.value:
        line = _line_of(name_node)
        if not isinstance(name_node, yaml.ScalarNode):
            yield line, f"{key}: a list or a mapping cannot be a key".removeprefix(": ")
            continue
        name = str(name_node.value)
        full_key = _join(key, name)
        if problem := _scalar_problem(name_node):
            yield line, f"the key {show_value(full_key)} {problem}"
        if name in first_lines:
            yield line, f"{full_key} is set twice, first on line {first_lines[name]}; keep one of them"
        first_lines[name] = lines[full_key] = line
        yield from _index_node(value, full_key, lines, parents)


def _join(key: str, name: str) -> str:
    """Return the dotted key of `name` inside `key`. At the top level, `key` is empty."""
    return f"{key}.{name}" if key else name


def _line_of(node: yaml.Node) -> int:
    """Return the number of the line on which a node begins, counted from 1."""
    return node.start_mark.line + 1


def _scalar_problem(node: yaml.Node) -> str | None:
    """Return a problem that makes a scalar invalid for every key, such as a NUL character; None if there is none."""
    text = str(node.value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return "contains a NUL character or a lone surrogate; remove it"
    if len(text) > MAX_DIGITS and node.tag.endswith((":int", ":float")):
        return f"has {len(text):,} digits; expected at most {MAX_DIGITS}"
    return None
