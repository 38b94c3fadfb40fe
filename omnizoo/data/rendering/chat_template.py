"""Render conversations with a chat template, within limits on time and memory, and find the targets in the text."""

import itertools
import re
from os.path import commonprefix
from typing import Any, NoReturn

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template  # returns character spans; checked on 5.22.2

from omnizoo.config.errors import UserError
from omnizoo.data.rendering.template_limits import OutOfTime, limits
from omnizoo.data.row import BadRow
from omnizoo.data.rows.messages import Message

Span = tuple[int, int]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAGS_HINT = "Add {% generation %} tags around the responses to the chat template."
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# Limits for rendering one conversation. Real templates need far less.
MAX_SECONDS = 2.0  # processor time
MAX_MEMORY = 1 << 30  # bytes
MAX_CHARACTERS = 1 << 24  # length of the text


class TemplateRefusal(BadRow):
    """Raised if the chat template raises an error for a conversation."""


class ChatTemplate:
    """A chat template with the tools of one row. Renders conversations, and finds the characters that are targets.

    Templates are untrusted programs that come with a tokenizer, so their time and memory are limited. If the template
    raises an error, the row is a bad row. Invalid syntax, or exceeding a limit even for two short messages, raises a
    `UserError`.

    Args:
        source: The Jinja source of the template.
        tools: The tools of the row; None if there are none.
        special_tokens: Special tokens of the tokenizer by name, such as `bos_token`.
    """

    def __init__(self, source: str, tools: list[Any] | None, special_tokens: dict[str, Any]) -> None:
        self.source = source
        self.tools = tools
        self.special_tokens = special_tokens

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """Return the text of a conversation. If `prompt` is True, it ends with the header of a response."""
        return self._render(messages, add_generation_prompt=prompt)[0]

    def _render(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """Return the text and its generation spans. Converts all errors to `BadRow` or `UserError`."""
        try:
            text, spans = self._run(messages, **options)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"model.tokenizer: line {error.lineno} of the chat template is invalid: {error}") from None
        except TEMPLATE_ERRORS as error:
            raise TemplateRefusal(f"the chat template rejects these messages: {error}") from None
        except OutOfTime:
            self._raise_exceeded(f"needs more than {MAX_SECONDS:g} s of processor time")
        except MemoryError:
            self._raise_exceeded(f"needs more than {MAX_MEMORY >> 20:,} MiB of memory")
        except Exception as error:
            # for example ZeroDivisionError or RecursionError
            message = f"the chat template rejects these messages: {type(error).__name__}: {error}"
            raise TemplateRefusal(message) from error
        if len(text) > MAX_CHARACTERS:
            raise BadRow(
                f"the chat template renders {len(text):,} characters, more than the limit of {MAX_CHARACTERS:,}"
            )
        return text, spans

    def _run(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """Run the template within the limits, without converting errors."""
        with limits(MAX_SECONDS, MAX_MEMORY):
            result: Any = render_jinja_template(  # the annotated return type (str) is wrong
                [messages], tools=self.tools, chat_template=self.source, **options, **self.special_tokens
            )
        (text,), spans = result
        return text, spans[0] if spans else []

    def _raise_exceeded(self, excess: str) -> NoReturn:
        """Raise `UserError` if the template exceeds a limit even for two short messages, otherwise `BadRow`."""
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            self._run(turns)
        except (OutOfTime, MemoryError):
            message = f"model.tokenizer: the chat template {excess}, even for two short messages. Use another template."
            raise UserError(message) from None
        except TEMPLATE_ERRORS:
            pass
        raise BadRow(f"the chat template {excess} for this row")

    def target_spans(self, messages: list[Message], weights: list[float]) -> tuple[str, list[tuple[Span, float]]]:
        """Render a conversation, and find the characters that are targets.

        Templates with {% generation %} tags mark the spans of the assistant. For other templates and roles, spans are
        found by rendering variants of the conversation (`prefix_spans`, `probe`).

        Args:
            messages: The messages, without loss keys.
            weights: The loss weight of each message; 0 if it is not trained on.

        Returns:
            The text, and the span and the weight of each message with a nonzero weight.
        """
        if GENERATION_TAG.search(self.source):
            return self._tagged_spans(messages, weights)

        text = self.render(messages)
        turns = [i for i, weight in enumerate(weights) if weight]
        responses = [i for i in turns if messages[i]["role"] == "assistant"]
        header, spans = self.prefix_spans(messages, responses, text)
        missing = [i for i in turns if i not in spans]
        spans |= zip(missing, self.probe(messages, missing, text, header), strict=True)
        return text, [(span, weights[i]) for i, span in spans.items()]

    def _tagged_spans(self, messages: list[Message], weights: list[float]) -> tuple[str, list[tuple[Span, float]]]:
        """Find the targets of a template with {% generation %} tags. See `target_spans`."""
        text, tagged = self._render(messages, return_assistant_tokens_mask=True)
        responses = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        distinct_weights = {weights[i] for i in responses} or {1.0}
        if len(distinct_weights) == 1 and all(distinct_weights):
            targets = [(span, min(distinct_weights)) for span in tagged]
        elif len(tagged) == len(responses):
            targets = [(span, weights[i]) for span, i in zip(tagged, responses, strict=True) if weights[i]]
        else:
            raise BadRow(
                f"the chat template has {len(tagged)} generation spans for {len(responses)} assistant messages, but "
                "messages with different weights need one each"
            )
        others = [i for i in range(len(messages)) if weights[i] and i not in responses]
        spans = self.probe(messages, others, text, header="")
        targets += [(span, weights[i]) for i, span in zip(others, spans, strict=True)]
        return text, targets

    def prefix_spans(self, messages: list[Message], turns: list[int], text: str) -> tuple[str, dict[int, Span]]:
        """Find the spans of assistant messages by rendering prefixes of the conversation.

        The span of a message begins where the generation prompt ends, and ends where the conversation up to this
        message ends. It is found only if both renderings are prefixes of the whole text. Templates that rewrite earlier
        turns therefore leave gaps. So do templates without a header, because it is unknown which part of the text
        before the content the model would generate.

        Args:
            messages: All messages.
            turns: Indices of the assistant messages to find.
            text: The rendered conversation.

        Returns:
            The header that a generation prompt ends with, and the span of each message that was found, by index.
        """
        turns = [i for i in turns if i > 0]  # most templates cannot render an empty conversation
        header = ""
        spans: dict[int, Span] = {}
        try:
            for i in turns:
                before = self.render(messages[:i], prompt=True)
                if i == turns[0]:
                    unprompted = self.render(messages[:i])
                    header = before.removeprefix(unprompted) if before.startswith(unprompted) else ""
                after = self.render(messages[: i + 1]).rstrip()
                ends_with_header = bool(header) and before.endswith(header)
                if ends_with_header and after.startswith(before) and text.startswith(after):
                    spans[i] = (len(before), len(after))
        except TemplateRefusal:
            return "", {}
        return header, spans

    def probe(self, messages: list[Message], turns: list[int], text: str, header: str) -> list[Span]:
        """Find the spans of messages by rendering the conversation with a marker instead of their content.

        Args:
            messages: All messages.
            turns: Indices of the messages to find.
            text: The rendered conversation.
            header: The header that a generation prompt ends with; "" if unknown.

        Returns:
            The span of each message in `turns`.

        Raises:
            BadRow: If the span of a message is ambiguous.
        """
        if not turns:
            return []
        prefix = unused_mark(text)
        marks = [f"{prefix}{i}x" for i in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        skeleton = self.render(marked)
        spans = []
        for i in turns:
            conversation = self.render([*messages[:i], marked[i], *messages[i + 1 :]])
            beginning = self.render([*messages[:i], marked[i]])
            before, mark, after = conversation.partition(marks[i])
            # The end-of-turn marker follows the content whether or not more messages follow.
            after_in_beginning = beginning.partition(marks[i])[2]
            end_of_turn = commonprefix([after, after_in_beginning]).rstrip()  # noqa: RUF071 (no paths)
            stop = len(text) - len(after) + len(end_of_turn)
            # Text that the template inserts between header and content (an empty thinking block) is a target too.
            start = len(before)
            between = skeleton.partition(marks[i])[0]
            if i > 0:
                between = between.rpartition(marks[i - 1])[2]
            if header and header in between and before.endswith(between):
                start -= len(between) - between.rindex(header) - len(header)

            is_unchanged = text.startswith(before[:start]) and text.endswith(after)
            if not mark or not is_unchanged or start > stop:
                raise BadRow(f"the position of message {i} in the chat template's output is ambiguous. {TAGS_HINT}")
            spans.append((start, stop))
        return spans


def unused_mark(text: str) -> str:
    """Return a marker word that does not occur in a text."""
    marks = (f"mark{number}x" for number in itertools.count())
    return next(mark for mark in marks if mark not in text)
