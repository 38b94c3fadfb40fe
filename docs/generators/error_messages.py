"""Error messages by config key, collected from the source: texts of `UserError`, `BadRow` and checks of the schema."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from generators.markdown import code, table
from generators.source import modules, syntax_tree
from omnizoo.config import reference

RAISED = ("UserError", "TrainingError")
RAISED_IN_CONFIG = (*RAISED, "ValueError")  # checks of the schema; the user gets them as `UserError`
RAISED_FOR_ROWS = ("BadRow", "BadMedia")
KEY = re.compile(r"(\w+(?:\.(?:\w+|\{[^}]*\}))+)")
FLAG = re.compile(r"(--[\w-]+)")


class Message(NamedTuple):
    key: str  # config key, command-line flag, or "" if the message starts with neither
    text: str  # with placeholders, such as `{path}`


def messages_by_key() -> str:
    """Return a section with a table of messages for each section of the config, the command line, rows, and others."""
    messages = sorted(set(_all_messages()))
    headings = {name: f"{name}.*" for name in reference.sections()} | {"--": "Command line", "": "Other messages"}
    parts = []
    for prefix, heading in headings.items():
        chosen = [message for message in messages if _belongs(message, prefix)]
        parts += [f"## {heading.removesuffix('.*')}\n", _table(chosen)]
    rows = sorted({message.text for message in _messages_of(RAISED_FOR_ROWS)})
    parts += ["## Rows and media\n", "The name of the file and the line come first.\n"]
    parts.append(table(("message",), [(code(text),) for text in rows]))
    return "\n".join(parts)


def _belongs(message: Message, prefix: str) -> bool:
    if prefix in ("", "--"):
        return message.key.startswith("--") if prefix else message.key == ""
    return message.key == prefix or message.key.startswith(f"{prefix}.")


def _table(messages: list[Message]) -> str:
    if not any(message.key for message in messages):
        return table(("message",), [(code(message.text),) for message in messages])
    return table(("key", "message"), [(code(message.key), code(message.text)) for message in messages])


def _all_messages() -> Iterator[Message]:
    yield from _messages_of(RAISED)
    for module in modules():
        if module.startswith("omnizoo.config."):
            yield from _messages_in(module, RAISED_IN_CONFIG)


def _messages_of(classes: tuple[str, ...]) -> Iterator[Message]:
    for module in modules():
        yield from _messages_in(module, classes)


def _messages_in(module: str, classes: tuple[str, ...]) -> Iterator[Message]:
    """Yield the messages of `Class("...")` calls in a module. Messages without any text of their own are left out."""
    for name, argument in _calls_in(module):
        if name in classes:
            text = _template(argument)
            if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", text)):
                yield Message(_key(text, module), text)


@cache
def _calls_in(module: str) -> list[tuple[str, ast.expr]]:
    """Return the name and the first argument of every call in a module."""
    calls = [node for node in ast.walk(syntax_tree(module)) if isinstance(node, ast.Call) and node.args]
    return [(call.func.id, call.args[0]) for call in calls if isinstance(call.func, ast.Name)]


def _template(node: ast.expr) -> str:
    """Return a string expression as text, with `{name}` for inserted values; "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _placeholder(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return ""


def _placeholder(value: ast.expr) -> str:
    """Return `{name}` for a name or attribute, and `{...}` for other expressions."""
    if isinstance(value, ast.Name):
        return f"{{{value.id}}}"
    if isinstance(value, ast.Attribute):
        return "{class}" if value.attr == "__name__" else f"{{{value.attr}}}"
    return "{...}"


def _key(text: str, module: str) -> str:
    """Return the config key or flag that a message starts with. Checks of a section may leave out its name."""
    if flag := FLAG.match(text):
        return flag[1]
    if found := KEY.match(text):
        key = reference.schema_key(re.sub(r"\{[^}]*\}", "0", found[1]))
        while key:
            if key in KNOWN_KEYS:
                return key
            key = key.rpartition(".")[0]
    first_word = re.split(r"[: ]", text)[0]
    if first_word in reference.sections():
        return first_word
    section = module.removeprefix("omnizoo.config.sections.")
    return section if section in reference.sections() else ""


KNOWN_KEYS = {key.key for key in reference.all_keys()}
