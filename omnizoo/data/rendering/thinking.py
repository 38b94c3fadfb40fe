"""Handle the reasoning of assistant messages, according to `data.thinking` and `data.thinking_tags`.

Chat templates of reasoning models usually drop the reasoning of earlier turns, because the model does not receive it at
inference. Training on such a turn would teach the model to respond without reasoning. By default, the conversation
therefore becomes several samples, each of which ends with a turn that has reasoning.
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

# What to do if the template drops reasoning.
DROPPED = (
    "Set data.thinking_tags to write `reasoning_content` into the content, or set `data.thinking: drop` to "
    "train on responses without reasoning."
)


class TurnChoice(NamedTuple):
    """One sample of a conversation: the messages that it contains, and the messages that it trains on."""

    stop: int  # the sample contains the first `stop` messages
    trained: frozenset[int]  # indices of the messages that are trained on


@dataclass(frozen=True)
class Thinking:
    """The settings `data.thinking` and `data.thinking_tags`."""

    mode: str = "template"  # `data.thinking`
    tags: tuple[str, ...] = ()  # `data.thinking_tags`: text before and after the reasoning; empty if not set

    @classmethod
    def of(cls, data: DataSection) -> "Thinking":
        """Return the settings in the `data` section of a config."""
        return cls(data.thinking, tuple(data.thinking_tags or ()))

    def prepare(self, messages: Sequence[Message]) -> None:
        """Change assistant messages in place: drop their reasoning, or write it into their content.

        With `data.thinking: drop`, reasoning is removed from fields and contents. With `data.thinking_tags`, reasoning
        in a field is moved to the beginning of the content. Otherwise, the messages stay unchanged.
        """
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
        """Choose the samples of a conversation so that each message is trained on together with its reasoning.

        Args:
            template: The chat template.
            messages: The messages, with their loss weight as `loss` and their content as text.

        Returns:
            The samples. There is only one if the template does not drop any reasoning.

        Raises:
            BadRow: If the template never writes the reasoning of a message, or if `data.thinking` is `refuse` and the
                template drops reasoning.
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
    """Return samples for the messages whose reasoning the template drops if more messages follow.

    Args:
        template: The chat template.
        messages: The messages, without the keys that set loss weights.
        hidden: Indices of the messages whose reasoning is dropped.

    Raises:
        BadRow: If the template drops the reasoning of a message even if it is the last one.
    """
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
    """Whether an assistant message contains reasoning, either in a field or between think tags in its content."""
    if message["role"] != "assistant":
        return False
    if any(isinstance(message.get(name), str) and message[name].strip() for name in REASONING):
        return True
    content = message["content"]
    thoughts = [text for text, is_thought in split_thoughts(content) if is_thought]
    return any(text.strip() and not THINK_TAG.fullmatch(text) for text in thoughts)


def dropped_thoughts(template: ChatTemplate, messages: list[Message]) -> frozenset[int]:
    """Return the indices of the messages with reasoning that the template does not write."""
    numbers = [i for i, message in enumerate(messages) if has_reasoning(message)]
    word = unused_mark(repr(messages))
    text = template.render(mark_messages(messages, numbers, word))
    written = {mark.message for mark in find_marks(text, word) if mark.kind == THOUGHT}
    return frozenset(numbers) - written


def keep_thoughts(
    template: ChatTemplate, messages: list[Message], text: str, targets: list[tuple[Span, float]]
) -> tuple[str, list[tuple[Span, float]]]:
    """Insert reasoning that the template dropped into a rendered conversation (`data.thinking: keep`).

    Each turn gets the text that it has in a conversation that ends with this turn.

    Args:
        template: The chat template.
        messages: The messages, without the keys that set loss weights.
        text: The rendered conversation.
        targets: The spans and weights of the messages that are trained on.

    Returns:
        The text with reasoning, and the targets in it.

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
    """Return the new position of a span after a part of the text was replaced.

    Args:
        span: The span before the replacement.
        replaced: The span of the replaced text.
        length: Number of characters that replaced it.
    """
    start, stop = replaced
    shift = length - (stop - start)
    first, last = span
    return (first + shift if first >= stop else first, last + shift if last >= stop else last)


def _last_turn(template: ChatTemplate, messages: list[Message]) -> str:
    """Return the text that the template writes for the last message, including its reasoning.

    Raises:
        BadRow: If the template drops the reasoning of the message.
    """
    number = len(messages) - 1
    text = template.render(messages)
    turn = template.turns_of(messages, text)[number]
    if turn is None or number in dropped_thoughts(template, messages):
        raise BadRow(f"the chat template drops the reasoning of message {number}. {DROPPED}")
    return text[slice(*turn)].rstrip()


def _join_overlapping(thought: str, response: str, number: int) -> str:
    """Join two texts of the same turn: a text with reasoning, and the end of a text without it.

    Args:
        thought: The turn with reasoning, as the last turn of a conversation.
        response: The turn without reasoning, as an earlier turn. Its end may have additional marks.
        number: Index of the message, for the error message.

    Raises:
        BadRow: If the end of the first text does not occur in the second one.
    """
    same = len(commonprefix([thought, response]))  # noqa: RUF071 (no paths); both may begin with the same tag
    for start in (0, same):
        for stop in range(len(response), start, -1):
            if thought.endswith(response[start:stop]):
                return thought + response[stop:]
    raise BadRow(f"data.thinking: keep is not possible, because the end of message {number} depends on its position")


def _without_thoughts(content: Any) -> Any:
    """Return the content of a message (a text or a list of parts) without reasoning between think tags."""
    if isinstance(content, str):
        rest = "".join(text for text, is_thought in split_thoughts(content) if not is_thought)
        return rest if rest == content else rest.lstrip()
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        has_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        parts.append({**part, "text": _without_thoughts(part["text"])} if has_text else part)
    return parts


def _with_text(text: str, content: Any) -> Any:
    """Return the content of a message (a text, a list of parts, or None) with a text added at the beginning."""
    if isinstance(content, list):
        return [{"type": "text", "text": text}, *content]
    return text + (content or "")
