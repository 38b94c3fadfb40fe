"""Render conversations by a chat template, with limits on time and memory, and find the targets in the text."""

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
TAGS_HINT = "put {% generation %} tags around what the model writes into the template"
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# Limits for rendering one conversation: processor time, bytes, characters of output. Real templates need far less.
MOST_SECONDS, MOST_MEMORY, MOST_TEXT = 2.0, 1 << 30, 1 << 24


class TemplateRefusal(BadRow):
    """Raised if the chat template raises an error for a conversation."""


class ChatTemplate:
    """A chat template with the tools of one row. Renders conversations, and finds the characters that are targets.

    Templates are untrusted programs that come with a tokenizer, so their time and memory are limited. An error of the
    template makes a bad row. Invalid syntax, or exceeding a limit even for two short messages, is a `UserError`.

    Args:
        source: The Jinja source of the template.
        tools: The tools of the row; None if there are none.
        special_tokens: Special tokens of the tokenizer by name, such as `bos_token`.
    """

    def __init__(self, source: str, tools: list[Any] | None, special_tokens: dict[str, Any]) -> None:
        self.source, self.tools, self.special_tokens = source, tools, special_tokens

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """Return the text of a conversation. If `prompt` is True, it ends with the header of a response."""
        return self._render(messages, add_generation_prompt=prompt)[0]

    def _render(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """Return the text and its generation spans. Converts all errors to `BadRow` or `UserError`."""
        try:
            text, spans = self._run(messages, **options)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of the tokenizer is not valid, line {error.lineno}: {error}") from None
        except TEMPLATE_ERRORS as error:
            raise TemplateRefusal(f"the chat template refuses these messages: {error}") from None
        except OutOfTime:
            self._blame(f"takes more than {MOST_SECONDS:g} s of computing")
        except MemoryError:
            self._blame(f"takes more than {MOST_MEMORY >> 20:,} MiB of memory")
        except Exception as error:
            # for example ZeroDivisionError or RecursionError
            message = f"the chat template refuses these messages: {type(error).__name__}: {error}"
            raise TemplateRefusal(message) from error
        if len(text) > MOST_TEXT:
            raise BadRow(f"the chat template writes {len(text):,} characters for it, more than {MOST_TEXT:,}")
        return text, spans

    def _run(self, messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """Run the template within the limits, without converting errors."""
        with limits(MOST_SECONDS, MOST_MEMORY):
            written: Any = render_jinja_template(  # the annotated return type (str) is wrong
                [messages], tools=self.tools, chat_template=self.source, **options, **self.special_tokens
            )
        (text,), spans = written
        return text, spans[0] if spans else []

    def _blame(self, what: str) -> NoReturn:
        """Raise `UserError` if the template exceeds a limit even for two short messages, and else `BadRow`."""
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            self._run(turns)
        except (OutOfTime, MemoryError):
            raise UserError(f"the chat template of the tokenizer {what}, whatever it is given") from None
        except TEMPLATE_ERRORS:
            pass
        raise BadRow(f"the chat template {what} for it")

    def target_spans(self, messages: list[Message], wanted: list[float]) -> tuple[str, list[tuple[Span, float]]]:
        """Render a conversation, and find the characters that are targets.

        Templates with {% generation %} tags mark the spans of the assistant. Other spans are found by rendering
        variants of the conversation (`prefix_spans`, `probe`).

        Args:
            messages: The messages, without loss keys.
            wanted: The loss weight of each message; 0 if it is not trained on.

        Returns:
            The text, and the span and the weight of each message with a weight.
        """
        if GENERATION_TAG.search(self.source):
            text, tagged = self._render(messages, return_assistant_tokens_mask=True)
            assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            weights = {wanted[i] for i in assistants} or {1.0}
            if len(weights) == 1 and all(weights):
                spans = [(span, min(weights)) for span in tagged]
            elif len(tagged) == len(assistants):
                spans = [(span, wanted[i]) for span, i in zip(tagged, assistants, strict=True) if wanted[i]]
            else:
                raise BadRow(
                    f"the chat template tags {len(tagged)} generations in {len(assistants)} assistant messages"
                )
            others = [i for i in range(len(messages)) if wanted[i] and i not in assistants]
            found = dict(zip(others, self.probe(messages, others, text, header=""), strict=True))
            return text, spans + [(span, wanted[i]) for i, span in found.items()]

        text = self.render(messages)
        turns = [i for i, want in enumerate(wanted) if want]
        header, found = self.prefix_spans(messages, [i for i in turns if messages[i]["role"] == "assistant"], text)
        gaps = [i for i in turns if i not in found]
        found |= zip(gaps, self.probe(messages, gaps, text, header), strict=True)
        return text, [(span, wanted[i]) for i, span in found.items()]

    def prefix_spans(self, messages: list[Message], turns: list[int], text: str) -> tuple[str, dict[int, Span]]:
        """Find the spans of assistant messages by rendering prefixes of the conversation.

        The span of a message begins where the generation prompt ends, and ends where the conversation up to this
        message ends. It is found only if both renderings are prefixes of the whole text. Templates that rewrite earlier
        turns therefore leave gaps. So do templates without a header, because it is unknown which of the text before the
        content the model would generate.

        Args:
            messages: All messages.
            turns: Indices of the assistant messages to find.
            text: The rendered conversation.

        Returns:
            The header that a generation prompt ends with, and the span of each message that was found, by index.
        """
        turns = [i for i in turns if i > 0]  # most templates cannot render an empty conversation
        header = ""
        found: dict[int, Span] = {}
        try:
            for i in turns:
                before = self.render(messages[:i], prompt=True)
                if i == turns[0]:
                    unprompted = self.render(messages[:i])
                    header = before.removeprefix(unprompted) if before.startswith(unprompted) else ""
                after = self.render(messages[: i + 1]).rstrip()
                if header and before.endswith(header) and after.startswith(before) and text.startswith(after):
                    found[i] = (len(before), len(after))
        except TemplateRefusal:
            return "", {}
        return header, found

    def probe(self, messages: list[Message], turns: list[int], text: str, header: str) -> list[Span]:
        """Find the spans of messages by rendering the conversation with a marker instead of their content.

        Args:
            messages: All messages.
            turns: Indices of the messages to find.
            text: The rendered conversation.
            header: The header that a generation prompt ends with; "" if unknown.

        Returns:
            The span of each message of `turns`.

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
            unclear = BadRow(f"cannot tell where message {i} is in what the chat template writes: {TAGS_HINT}")
            whole = self.render([*messages[:i], marked[i], *messages[i + 1 :]])
            alone = self.render([*messages[:i], marked[i]])
            before, found, after = whole.partition(marks[i])
            # The end-of-turn marker follows the content whether or not more messages follow.
            end_of_turn = commonprefix([after, alone.partition(marks[i])[2]]).rstrip()  # noqa: RUF071 (no paths)
            stop = len(text) - len(after) + len(end_of_turn)
            # Text that the template inserts between header and content (an empty thinking block) is a target too.
            start = len(before)
            between = skeleton.partition(marks[i])[0]
            between = between if i == 0 else between.rpartition(marks[i - 1])[2]
            if header and header in between and before.endswith(between):
                start -= len(between) - between.rindex(header) - len(header)
            if not found or not text.endswith(after) or not text.startswith(before[:start]) or start > stop:
                raise unclear
            spans.append((start, stop))
        return spans


def unused_mark(text: str) -> str:
    """Return a marker word that does not occur in a text."""
    marks = (f"mark{number}x" for number in itertools.count())
    return next(mark for mark in marks if mark not in text)
