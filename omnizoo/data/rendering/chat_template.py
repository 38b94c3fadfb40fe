"""Render conversations with a chat template. Its time and memory are limited, because it is an untrusted program."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2

from omnizoo.config.errors import UserError
from omnizoo.data.rendering.template_limits import OutOfTime, limits
from omnizoo.data.rendering.template_sandbox import OPEN, Span, render_template, split_turns
from omnizoo.data.row import BadRow
from omnizoo.data.rows.messages import Message

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# Limits for rendering one conversation. Real templates need far less.
MAX_SECONDS = 2.0  # CPU time
MAX_MEMORY = 1 << 30  # bytes
MAX_CHARACTERS = 1 << 24  # length of the rendered text


class TemplateRefusal(BadRow):
    """Raised if the chat template reports an error for a conversation, for example because roles do not alternate."""


class ChatTemplate:
    """A chat template with the tools of one row. Its methods render conversations.

    All methods raise `BadRow` if the template raises an error or exceeds a limit. They raise `UserError` if the syntax
    of the template is invalid, or if it exceeds a limit even for two short messages.

    Args:
        source: The Jinja source of the template.
        tools: The tools of the row; None if there are none.
        special_tokens: Special tokens of the tokenizer by name, such as `bos_token`.
        options: Further variables for the template (`data.template_options`).
    """

    def __init__(
        self,
        source: str,
        tools: list[Any] | None,
        special_tokens: Mapping[str, Any],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.source = source
        self.tools = tools
        self.variables = {"documents": None, **options, **special_tokens, "tools": tools}

    def render(self, messages: list[Message], prompt: bool = False) -> str:
        """Return the text of a conversation. If `prompt` is True, it ends with the header of a response."""
        return self._render(messages, prompt=prompt)[0]

    def render_tagged(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans of text inside {% generation %} tags."""
        return self._render(messages)

    def render_turns(self, messages: list[Message]) -> tuple[str, list[Span | None]]:
        """Return the text of a conversation, and the span of text that belongs to each message; None if unknown."""
        marked, _ = self._render(messages, marks_turns=True)
        return split_turns(marked, len(messages))

    def turns_of(self, messages: list[Message], text: str) -> list[Span | None]:
        """Return the span of each message in a text that was rendered before.

        Args:
            messages: The messages.
            text: The text from `render`.

        Returns:
            The span of each message; None if it is unknown.
        """
        unknown: list[Span | None] = [None] * len(messages)
        if OPEN in text:
            return unknown
        unmarked, turns = self.render_turns(messages)
        return turns if unmarked == text else unknown

    def _render(
        self, messages: list[Message], prompt: bool = False, marks_turns: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text and its generation spans. Convert all errors of the template to `BadRow` or `UserError`."""
        try:
            text, spans = self._run(messages, prompt, marks_turns)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"model.tokenizer: line {error.lineno} of the chat template is invalid: {error}") from None
        except TEMPLATE_ERRORS as error:
            raise TemplateRefusal(f"the chat template rejects these messages: {error}") from None
        except OutOfTime:
            self._raise_exceeded(f"needs more than {MAX_SECONDS:g} s of CPU time")
        except MemoryError:
            self._raise_exceeded(f"needs more than {MAX_MEMORY >> 20:,} MiB of memory")
        except Exception as error:  # such as ZeroDivisionError or RecursionError
            message = f"the chat template rejects these messages: {type(error).__name__}: {error}"
            raise TemplateRefusal(message) from error
        if len(text) > MAX_CHARACTERS:
            raise BadRow(
                f"the chat template writes {len(text):,} characters, more than the limit of {MAX_CHARACTERS:,}"
            )
        return text, spans

    def _run(self, messages: list[Message], prompt: bool = False, marks_turns: bool = False) -> tuple[str, list[Span]]:
        """Run the template within the limits, without converting errors."""
        variables = {**self.variables, "add_generation_prompt": prompt}
        with limits(MAX_SECONDS, MAX_MEMORY):
            return render_template(self.source, messages, variables, marks_turns)

    def _raise_exceeded(self, excess: str) -> NoReturn:
        """Raise the error for a template that has exceeded a limit.

        Raises:
            UserError: If the template exceeds the limit even for two short messages.
            BadRow: If it exceeds the limit only for this row.
        """
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            self._run(turns)
        except (OutOfTime, MemoryError):
            message = f"model.tokenizer: the chat template {excess}, even for two short messages. Use another template."
            raise UserError(message) from None
        except TEMPLATE_ERRORS:
            pass
        raise BadRow(f"the chat template {excess} for this row")
