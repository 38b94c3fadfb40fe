"""A chat template with the tools of one row: what it writes, within bounds, and where in it the loss is."""

import itertools
import re
from os.path import commonprefix
from typing import Any, NoReturn

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template  # gives character spans; checked on 5.22.2

from omnizoo.config.errors import UserError
from omnizoo.data.limits import OutOfTime, limits
from omnizoo.data.messages import Message
from omnizoo.data.rows import BadRow

Span = tuple[int, int]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAGS_HINT = "put {% generation %} tags around what the model writes into the template"
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# What a chat template may take to write one conversation; of the text, in characters. Far above what any needs.
MOST_SECONDS, MOST_MEMORY, MOST_TEXT = 2.0, 1 << 30, 1 << 24
AT_ONCE = 1 << 22  # characters of beginnings of a conversation that are there together


class ChatTemplate:
    """A chat template with the tools of one row: finds the characters of a rendered conversation the loss is on.

    Templates are programs that come with a tokenizer, so what they do is bounded, and whatever they raise is about
    their row, or about themselves if they cannot even write two short messages.
    """

    def __init__(self, source: str, tools: list[Any] | None, special_tokens: dict[str, Any]) -> None:
        self.source, self.tools, self.special_tokens = source, tools, special_tokens

    def render(self, *conversations: list[Message], prompt: bool = False) -> list[str]:
        return self._render(list(conversations), add_generation_prompt=prompt)[0]

    def _render(self, conversations: list[list[Message]], **options: Any) -> tuple[list[str], list[list[Span]]]:
        try:
            texts, spans = self._run(conversations, **options)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template of the tokenizer is not valid, line {error.lineno}: {error}") from None
        except TEMPLATE_ERRORS:
            raise
        except OutOfTime:
            self._blame(f"takes more than {MOST_SECONDS:g} s of computing")
        except MemoryError:
            self._blame(f"takes more than {MOST_MEMORY >> 20:,} MiB of memory")
        except Exception as error:
            # e.g. ZeroDivisionError, RecursionError
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        if (longest := max(map(len, texts))) > MOST_TEXT:
            raise BadRow(f"the chat template writes {longest:,} characters for it, more than {MOST_TEXT:,}")
        return texts, spans

    def _run(self, conversations: list[list[Message]], **options: Any) -> tuple[list[str], list[list[Span]]]:
        with limits(MOST_SECONDS * len(conversations), MOST_MEMORY):
            written: Any = render_jinja_template(  # its annotation (str) is not what it returns
                conversations, tools=self.tools, chat_template=self.source, **options, **self.special_tokens
            )
        return written  # type: ignore[no-any-return]

    def _blame(self, what: str) -> NoReturn:
        """The row; or the template, if it is as bad on a conversation that has next to nothing in it."""
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            self._run([turns])
        except (OutOfTime, MemoryError):
            raise UserError(f"the chat template of the tokenizer {what}, whatever it is given") from None
        except TEMPLATE_ERRORS:
            pass
        raise BadRow(f"the chat template {what} for it")

    def target_spans(self, messages: list[Message], wanted: list[float]) -> tuple[str, list[tuple[Span, float]]]:
        """The rendered conversation, and the spans of the messages with a weight in it, each with its own."""
        if GENERATION_TAG.search(self.source):
            (text,), (tagged,) = self._render([messages], return_assistant_tokens_mask=True)
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

        text = self.render(messages)[0]
        turns = [i for i, want in enumerate(wanted) if want]
        header, found = self.prefix_spans(messages, [i for i in turns if messages[i]["role"] == "assistant"], text)
        gaps = [i for i in turns if i not in found]
        found |= zip(gaps, self.probe(messages, gaps, text, header), strict=True)
        return text, [(span, wanted[i]) for i, span in found.items()]

    def prefix_spans(self, messages: list[Message], turns: list[int], text: str) -> tuple[str, dict[int, Span]]:
        """From what the model sees before it writes a turn to what is there once it has; and the header that a prompt
        for a turn ends with.

        Found for every turn up to which the template writes the conversation in the same way whether or not it goes
        on. Templates that rewrite earlier turns leave gaps; so do those without a header, where it cannot be told what
        before the content the model would write itself.
        """
        turns = [i for i in turns if i > 0]  # most templates cannot render no message at all
        if not turns:
            return "", {}
        # Some at a time: all beginnings of a long conversation together are as many times its length.
        most = max(1, AT_ONCE // max(1, len(text)))
        header = ""
        found: dict[int, Span] = {}
        try:
            for first in range(0, len(turns), most):
                some = turns[first : first + most]
                befores = self.render(*(messages[:i] for i in some), prompt=True)
                unprompted, *afters = self.render(messages[: some[0]], *(messages[: i + 1] for i in some))
                if not first:
                    header = befores[0].removeprefix(unprompted) if befores[0].startswith(unprompted) else ""
                found |= {
                    i: (len(before), len(after))
                    for i, before, after in zip(some, befores, map(str.rstrip, afters), strict=True)
                    if header and before.endswith(header) and after.startswith(before) and text.startswith(after)
                }
        except TEMPLATE_ERRORS:
            return "", {}
        return header, found

    def probe(self, messages: list[Message], turns: list[int], text: str, header: str) -> list[Span]:
        """The spans of messages, found by what surrounds a mark that is put in the place of their content."""
        if not turns:
            return []
        prefix = next(p for n in itertools.count() if (p := f"mark{n}x") not in text)
        marks = [f"{prefix}{i}x" for i in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        skeleton = self.render(marked)[0]
        spans = []
        for i in turns:
            unclear = BadRow(f"cannot tell where message {i} is in what the chat template writes: {TAGS_HINT}")
            whole, alone = self.render([*messages[:i], marked[i], *messages[i + 1 :]], [*messages[:i], marked[i]])
            before, found, after = whole.partition(marks[i])
            # the end-of-turn marker: what follows the content whether or not the conversation goes on
            end_of_turn = commonprefix([after, alone.partition(marks[i])[2]]).rstrip()  # noqa: RUF071 (no paths)
            stop = len(text) - len(after) + len(end_of_turn)
            # what the template itself puts between the header and the content (an empty thinking block) is learnt too
            start = len(before)
            between = skeleton.partition(marks[i])[0]
            between = between if i == 0 else between.rpartition(marks[i - 1])[2]
            if header and header in between and before.endswith(between):
                start -= len(between) - between.rindex(header) - len(header)
            if not found or not text.endswith(after) or not text.startswith(before[:start]) or start > stop:
                raise unclear
            spans.append((start, stop))
        return spans
