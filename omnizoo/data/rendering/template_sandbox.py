"""Run chat templates in a sandbox, and find the text that a template writes for each message.

The sandbox has the filters and functions of transformers. Unlike in transformers, a template may also change lists that
it created itself, for example with `append`. It cannot change the lists of messages and tools, and each rendering gets
a copy of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template  # private; checked on 5.22.2

Span = tuple[int, int]
Message = dict[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message that contain its reasoning
TURN_MARK = "turn_mark_of_omnizoo"  # name of the function that every loop calls with each of its items
OPEN, CLOSE = "\ue0f0", "\ue0f1"  # private-use characters around a mark; texts rarely contain them
ENTER, LEAVE = "enter", "leave"  # marks before and after a loop


class DataList(list[Any]):
    """A list in the messages or tools. A template cannot change it."""


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which a template may change its own lists."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute of an object."""
        if type(obj) is list and modifies_known_mutable(obj, attr):
            return True
        return super().is_safe_attribute(obj, attr, value)


class TurnMarker(NodeTransformer):
    """Changes a template so that its output has a mark before each loop, before each item of a loop, and after it."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802 (name expected by jinja2)
        """Add the marks to one loop and the loops inside it."""
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return [node]
        item = nodes.Name(node.target.name, "load")
        call = nodes.Call(nodes.Name(TURN_MARK, "load"), [item], [], None, None)
        node.body.insert(0, nodes.Output([call]))
        marked: list[nodes.Node] = [_write_mark(ENTER), node, _write_mark(LEAVE)]
        for part in marked:
            part.set_lineno(node.lineno)
        return marked


def _write_mark(name: str) -> nodes.Output:
    """Return a template node that writes a mark."""
    return nodes.Output([nodes.TemplateData(f"{OPEN}{name}{CLOSE}")])


@lru_cache(maxsize=32)
def compile_template(source: str, marks_turns: bool) -> jinja2.Template:
    """Compile a chat template. If `marks_turns` is True, its output has marks around loops (see `TurnMarker`)."""
    reference = _compile_jinja_template("").environment
    extensions = [type(extension) for extension in reference.extensions.values()]
    sandbox = ChatSandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters.update(reference.filters)
    sandbox.globals.update(reference.globals)
    tree = sandbox.parse(source)
    if marks_turns:
        tree = TurnMarker().visit(tree)
    return jinja2.Template.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))


def render_template(
    source: str, messages: Sequence[Message], variables: Mapping[str, Any], marks_turns: bool = False
) -> tuple[str, list[Span]]:
    """Render a conversation.

    Args:
        source: The Jinja source of the template.
        messages: The messages. A template can read their reasoning as `reasoning_content` and as `thinking`.
        variables: Other variables of the template.
        marks_turns: Whether to add marks to the text. `split_turns` removes them.

    Returns:
        The text, and the spans of text inside {% generation %} tags.
    """
    template = compile_template(source, marks_turns)
    data = [_with_reasoning(plain_data(message)) for message in messages]
    options = {name: plain_data(value) for name, value in variables.items()}
    numbers = {id(message): number for number, message in enumerate(data)}

    def mark_turn(item: Any) -> str:
        number = numbers.get(id(item))
        return "" if number is None else f"{OPEN}{number}{CLOSE}"

    # Fill `blocks` one piece at a time, because {% generation %} tags measure the length of the text in it.
    blocks: list[str] = []
    spans: list[Span] = []
    arguments = {**options, TURN_MARK: mark_turn, "messages": DataList(data)}
    with template.environment.activate_tracker(blocks, spans):  # type: ignore[attr-defined]
        for block in template.generate(**arguments):
            blocks.append(block)
    return "".join(blocks), spans


def plain_data(value: Any) -> Any:
    """Return a copy of a nested value that has only JSON types. Other objects are replaced by the name of their
    type."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return DataList(plain_data(item) for item in value)
    for base in (str, int, float):  # convert subclasses, because a template must not call their methods
        if isinstance(value, base):
            return base(value)
    item = getattr(value, "item", None)
    is_numpy_scalar = callable(item) and getattr(value, "shape", None) == ()
    return plain_data(item()) if callable(item) and is_numpy_scalar else f"<{type(value).__name__}>"


def _with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning in `reasoning_content` and `thinking`, the names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def split_turns(marked: str, num_messages: int) -> tuple[str, list[Span | None]]:
    """Remove the marks from a rendered text, and find the span of each message.

    Args:
        marked: The text from `render_template`, with marks.
        num_messages: Number of messages.

    Returns:
        The text without marks, and the span of each message. The span is None if no loop over the messages writes the
        message, or if text of another message interrupts it.
    """
    pieces: list[str] = []
    length = 0
    current: int | None = None  # the message that the template is writing
    enclosing: list[int | None] = []  # for each loop around the current position, the message before the loop
    spans: list[Span | None] = [None] * num_messages
    interrupted = set()
    for number, piece in enumerate(_split_at_marks(marked)):
        if number % 2:
            current = _follow_mark(piece, current, enclosing)
            continue
        start = length
        length += len(piece)
        pieces.append(piece)
        if current is None:
            continue
        known = spans[current]
        continues = known is not None and known[1] == start
        if not piece or (not continues and piece.isspace()):
            continue  # a loop that only searches for a message may write white space
        if known is not None and not continues:
            interrupted.add(current)
        spans[current] = (start if known is None else known[0], length)
    for message in interrupted:
        spans[message] = None
    return "".join(pieces), spans


def _split_at_marks(marked: str) -> Iterator[str]:
    """Yield texts and marks alternately. The first and the last value are texts; each text may be empty."""
    first, *others = marked.split(OPEN)
    yield first
    for other in others:
        mark, _, text = other.partition(CLOSE)
        yield mark
        yield text


def _follow_mark(mark: str, current: int | None, enclosing: list[int | None]) -> int | None:
    """Return the message that the template writes after a mark.

    Only the outermost loop over the messages counts, because a loop inside a turn often just searches other messages
    without writing them.

    Args:
        mark: The mark.
        current: The message that the template wrote before the mark.
        enclosing: For each loop around the mark, the message before the loop. It is changed in place.
    """
    if mark == ENTER:
        enclosing.append(current)
        return current
    if mark == LEAVE:
        return enclosing.pop() if enclosing else None
    is_nested = any(message is not None for message in enclosing)
    return int(mark) if mark.isdecimal() and not is_nested else current
