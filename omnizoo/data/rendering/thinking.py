"""Reasoning of assistant messages: write it into the content, drop it, or train it although templates drop it.

Chat templates of reasoning models usually drop the reasoning of earlier turns, because a model does not receive it at
inference. An earlier turn must then not be trained as an answer without its reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

from omnizoo.config.sections.data import DataSection
from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.marked_messages import (
    THINK_TAG,
    THOUGHT,
    find_marks,
    mark_messages,
    split_thoughts,
    unused_mark,
)
from omnizoo.data.rendering.response_spans import target_spans
from omnizoo.data.rendering.template_sandbox import REASONING, Span
from omnizoo.data.row import BadRow
from omnizoo.data.rows.messages import Message

DROPPED = (
    "Set data.thinking_tags to write `reasoning_content` into the content, or data.thinking: drop to train on "
    "responses without reasoning."
)


class TurnChoice(NamedTuple):
    """A sample of a conversation: its first `stop` messages, of which only some are trained on."""

    stop: int
    trained: frozenset[int]  # indices of messages


@dataclass(frozen=True)
class Thinking:
    """The settings `data.thinking` and `data.thinking_tags`."""

    mode: str = "template"
    tags: tuple[str, ...] = ()  # text before and after reasoning in the content; empty to keep the field

    @classmethod
    def of(cls, data: DataSection) -> "Thinking":
        """Return the settings of a run."""
        return cls(data.thinking, tuple(data.thinking_tags or ()))

    def prepare(self, messages: Sequence[Message]) -> None:
        """Drop the reasoning of assistant messages, or write it into their content, in place."""
        for message in messages:
            if message["role"] != "assistant":
                continue
            reasoning = next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")
            if self.mode == "drop" or (self.tags and reasoning):
                for name in REASONING:
                    message.pop(name, None)
            if self.mode == "drop":
                message["content"] = _without_thoughts(message.get("content"))
            elif self.tags and reasoning:
                message["content"] = _with_text(self.tags[0] + reasoning + self.tags[1], message.get("content"))

    def choose(self, template: ChatTemplate, messages: list[Message]) -> list[TurnChoice]:
        """Return the samples of a conversation, such that the reasoning of every trained message is written.

        Args:
            template: The chat template.
            messages: The messages with their loss weight as `loss`, and their content as text.

        Raises:
            BadRow: If the template never writes the reasoning, or `data.thinking` refuses the row.
        """
        trained = frozenset(i for i, message in enumerate(messages) if message["loss"])
        whole = TurnChoice(len(messages), trained)
        if not any(has_reasoning(message) for message in messages):
            return [whole]
        without_loss = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
        hidden = dropped_thoughts(template, without_loss) & trained
        if hidden and self.mode == "refuse":
            raise BadRow(f"the chat template drops the reasoning of message {min(hidden)}, but data.thinking is refuse")
        if not hidden or self.mode == "keep":
            return [whole]
        choices = [whole._replace(trained=trained - hidden)] if trained - hidden else []
        return choices + _choose_hidden(template, without_loss, hidden)


def _choose_hidden(template: ChatTemplate, messages: list[Message], hidden: frozenset[int]) -> list[TurnChoice]:
    """Return samples that end with turns whose reasoning the template drops when more messages follow."""
    choices: list[TurnChoice] = []
    while hidden:
        last = max(hidden)
        kept = hidden - dropped_thoughts(template, messages[: last + 1])
        if last not in kept:
            raise BadRow(f"the chat template drops the reasoning of message {last}. {DROPPED}")
        choices.insert(0, TurnChoice(last + 1, kept))
        hidden -= kept
    return choices


def has_reasoning(message: Message) -> bool:
    """Whether an assistant message contains reasoning, in a field or in its content as text."""
    if message["role"] != "assistant":
        return False
    if any(isinstance(message.get(name), str) and message[name].strip() for name in REASONING):
        return True
    content = message["content"]
    thoughts = [text for text, is_thought in split_thoughts(content) if is_thought]
    return any(text.strip() and not THINK_TAG.fullmatch(text) for text in thoughts)


def dropped_thoughts(template: ChatTemplate, messages: list[Message]) -> frozenset[int]:
    """Return the indices of the messages whose reasoning the template does not write."""
    numbers = [i for i, message in enumerate(messages) if has_reasoning(message)]
    word = unused_mark(repr(messages))
    text = template.render(mark_messages(messages, numbers, word))
    written = {mark.message for mark in find_marks(text, word) if mark.kind == THOUGHT}
    return frozenset(numbers) - written


def keep_thoughts(
    template: ChatTemplate, messages: list[Message], text: str, targets: list[tuple[Span, float]]
) -> tuple[str, list[tuple[Span, float]]]:
    """Write the reasoning of all turns into a rendered conversation (`data.thinking: keep`).

    A turn is written as in a conversation that ends with it.

    Args:
        template: The chat template.
        messages: The messages, without loss keys.
        text: The rendered conversation.
        targets: The spans and weights of the messages that are trained on.

    Returns:
        The text and its targets.

    Raises:
        BadRow: If the template never writes the reasoning of a turn.
    """
    hidden = sorted(dropped_thoughts(template, messages))
    weights = [float(message["role"] == "assistant") for message in messages]
    responses = [i for i, weight in enumerate(weights) if weight]
    spans = [span for span, _ in target_spans(template, messages, weights)[1]] if hidden else []
    turns = template.turns_of(messages, text) if hidden else []
    for i in reversed(hidden):
        start, stop = spans[responses.index(i)]
        turn = turns[i]
        if turn is None:
            raise BadRow(f"data.thinking: keep is not possible, because the position of message {i} is ambiguous")
        last_turn = _last_turn(template, messages[: i + 1])
        written = _join_overlapping(last_turn[start - turn[0] :], text[start:stop], i)
        text = text[:start] + written + text[stop:]
        targets = [(_moved(span, (start, stop), len(written)), weight) for span, weight in targets]
    return text, targets


def _moved(span: Span, replaced: Span, length: int) -> Span:
    """Return the place of a span after the text of another or the same span was replaced with `length` characters."""
    start, stop = replaced
    shift = length - (stop - start)
    first, last = span
    return (first + shift if first >= stop else first, last + shift if last >= stop else last)


def _last_turn(template: ChatTemplate, messages: list[Message]) -> str:
    """Return the text that the template writes for the last message."""
    number = len(messages) - 1
    text = template.render(messages)
    turn = template.turns_of(messages, text)[number]
    if turn is None or number in dropped_thoughts(template, messages):
        raise BadRow(f"the chat template drops the reasoning of message {number}. {DROPPED}")
    return text[slice(*turn)].rstrip()


def _join_overlapping(thought: str, response: str, number: int) -> str:
    """Return the turn with reasoning, followed by the end of the turn without it, which may contain more markers."""
    same = len(commonprefix([thought, response]))  # noqa: RUF071 (no paths); the tag before the reasoning
    for start in (0, same):
        for stop in range(len(response), start, -1):
            if thought.endswith(response[start:stop]):
                return thought + response[stop:]
    raise BadRow(f"data.thinking: keep is not possible, because the end of message {number} depends on its position")


def _without_thoughts(content: Any) -> Any:
    """Return a content without the reasoning in think tags."""
    if isinstance(content, str):
        rest = "".join(text for text, is_thought in split_thoughts(content) if not is_thought)
        return rest if rest == content else rest.lstrip()
    if not isinstance(content, list):
        return content
    return [
        {**part, "text": _without_thoughts(part["text"])}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _with_text(text: str, content: Any) -> Any:
    """Return a content that begins with a text."""
    if isinstance(content, list):
        return [{"type": "text", "text": text}, *content]
    return text + (content or "")
