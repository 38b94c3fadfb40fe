"""Replace the data of messages with marks, to find out where a chat template writes it.

A mark is a word that occurs nowhere in the conversation, such as `mark0x3r0x`. It consists of a prefix (`mark0x`), the
index of the message (3), the kind of the data (`r`) and the index of the tool call (0).
"""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from omnizoo.data.rendering.template_sandbox import REASONING, Message

CONTENT, CALL, THOUGHT = "c", "a", "r"  # kinds of marks: content, arguments of a tool call, and reasoning
# Tags around reasoning in the content, such as <think>, </seed:think>, [THINK] or <|/thinking|>.
THINK_TAG = re.compile(r"(<[^<>\s]*think(?:ing)?\b[^<>\s]*>|\[/?THINK\])", re.IGNORECASE)
CLOSING = re.compile(r"^[<\[][|]?/")


class Mark(NamedTuple):
    """A mark in a rendered text."""

    message: int  # index of the message
    kind: str  # CONTENT, CALL or THOUGHT
    call: int  # index of the tool call; 0 for other data
    start: int  # first character in the text
    stop: int  # character after the mark


def unused_mark(text: str) -> str:
    """Return a prefix for marks that does not occur in a text."""
    marks = (f"mark{number}x" for number in itertools.count())
    return next(mark for mark in marks if mark not in text)


def mark_message(message: Message, number: int, word: str) -> Message:
    """Return a copy of a message whose content, reasoning and arguments of tool calls are replaced with marks.

    Args:
        message: The message, with its content as text.
        number: Index of the message in the conversation.
        word: The prefix of marks, from `unused_mark`.
    """
    marked = dict(message)
    if message["content"].strip():
        marked["content"] = _mark_content(message["content"], number, word)
    for name in REASONING:
        if isinstance(message.get(name), str) and message[name].strip():
            marked[name] = _mark(word, number, THOUGHT)
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        marked["tool_calls"] = [_mark_call(call, _mark(word, number, CALL, index)) for index, call in calls]
    return marked


def _mark(word: str, number: int, kind: str, call: int = 0) -> str:
    """Return the text of a mark."""
    return f"{word}{number}{kind}{call}x"


def _mark_content(content: str, number: int, word: str) -> str:
    """Replace the texts between think tags and around the tags with marks. Keep white space and the tags."""
    pieces = split_thoughts(content)
    marked = []
    for text, is_thought in pieces:
        core = text.strip()
        if not core or THINK_TAG.fullmatch(core):
            marked.append(text)
            continue
        mark = _mark(word, number, THOUGHT if is_thought else CONTENT)
        marked.append(text.replace(core, mark))
    return "".join(marked)


def split_thoughts(content: str) -> list[tuple[str, bool]]:
    """Split a content at its think tags.

    Text before a closing tag is reasoning even without an opening tag, because some templates write the opening tag
    themselves.

    Returns:
        The texts and the tags in order, each with whether it is reasoning or a tag around reasoning.
    """
    pieces = THINK_TAG.split(content)
    last_close = max((i for i in range(1, len(pieces), 2) if CLOSING.match(pieces[i])), default=-1)
    return [(piece, i <= last_close) for i, piece in enumerate(pieces)]


def _mark_call(call: Any, mark: str) -> Any:
    """Replace the strings in the arguments of a tool call with marks. If there are none, add an argument."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _mark_call(call["function"], mark)}
    for name in ("arguments", "parameters"):
        if name not in call:
            continue
        arguments = call[name]
        if isinstance(arguments, str):
            return {**call, name: json.dumps(_mark_arguments(json.loads(arguments), mark), ensure_ascii=False)}
        return {**call, name: _mark_arguments(arguments, mark)}
    return call


def _mark_arguments(arguments: Any, mark: str) -> Any:
    """Replace the strings in arguments with marks. If an object has none, add an argument to it."""
    marked = _mark_strings(arguments, mark)
    if marked == arguments and isinstance(arguments, dict):
        return {**arguments, "argument": mark}
    return marked


def _mark_strings(value: Any, mark: str) -> Any:
    """Replace all strings in a nested value with a mark."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {name: _mark_strings(part, mark) for name, part in value.items()}
    if isinstance(value, list):
        return [_mark_strings(part, mark) for part in value]
    return value


def find_marks(text: str, word: str) -> list[Mark]:
    """Return all marks with the prefix `word` in a text, in order."""
    pattern = re.compile(f"{word}(\\d+)([{CONTENT}{CALL}{THOUGHT}])(\\d+)x")
    return [Mark(int(match[1]), match[2], int(match[3]), *match.span()) for match in pattern.finditer(text)]


def mark_messages(messages: Sequence[Message], numbers: Sequence[int], word: str) -> list[Message]:
    """Return copies of the messages. Messages at the indices `numbers` are marked (see `mark_message`)."""
    marked = list(messages)
    for number in numbers:
        marked[number] = mark_message(messages[number], number, word)
    return marked
