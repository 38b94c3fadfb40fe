"""A row becomes token ids and a mask of the tokens the loss is on.

Chat rows are written by the tokenizer's own template and tokenised once, as a whole. Which characters are the
assistant's is asked of the template too (by rendering variants of the conversation), never searched for in the text.
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template  # gives character spans; checked on 5.22.2

from omnizoo.config.errors import UserError
from omnizoo.data.sources import BadRow, Row

Message = dict[str, Any]
Span = tuple[int, int]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
TAGS_HINT = "put {% generation %} tags around what the model writes into the template"
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Rendered:
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]  # the loss is on predicting these tokens


class Renderer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, append_eos: bool) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path} is a slow one ({type(tokenizer).__name__}): it cannot tell which "
                "characters a token comes from; convert it to a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.append_eos = tokenizer, append_eos
        # the Rust tokenizer itself: calling it through transformers takes twice the time
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

    def render(self, row: Row) -> Rendered:
        if row.get("messages") is not None:
            ids, targets = self._render_chat(row["messages"], row.get("tools"))
        elif row.get("text") is not None:
            ids, targets = self._render_text(row["text"])
        else:
            raise BadRow(f"a row needs `text` or `messages`; this one has {', '.join(map(repr, row)) or 'nothing'}")
        if not targets[1:].any():
            raise BadRow("no token to learn: the loss is on none of its tokens, or on the first one only")
        return Rendered(ids, targets)

    def _render_text(self, text: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        if not isinstance(text, str):
            raise BadRow(f"`text` is {type(text).__name__}, not a string")
        if not text:
            raise BadRow("`text` is empty")
        ids = self.backend.encode(text).ids
        if self.append_eos:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise UserError(f"tokenizer {self.tokenizer.name_or_path} has no eos token; set data.append_eos: false")
            if ids[-1:] != [eos]:
                ids.append(eos)
        return np.array(ids, np.int32), np.ones(len(ids), np.bool_)

    def _render_chat(self, value: Any, tools: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        messages, wanted = check_messages(value)
        if tools is not None and not isinstance(tools, list):
            raise BadRow(f"`tools` is {type(tools).__name__}, not a list")
        if not self.tokenizer.chat_template:
            raise UserError(
                f"tokenizer {self.tokenizer.name_or_path} has no chat template, which rows with `messages` need; "
                "add a chat_template.jinja to its folder"
            )
        template = ChatTemplate(self.tokenizer.get_chat_template(tools=tools), tools, self.special_tokens)
        try:
            text, spans = template.target_spans(messages, wanted)
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses these messages: {error}") from None
        encoding = self.backend.encode(text, add_special_tokens=False)
        targets = np.zeros(len(encoding), np.bool_)
        for first, last in tokens_of_spans(encoding.offsets, spans):
            targets[first:last] = True
        return np.array(encoding.ids, np.int32), targets


def check_messages(value: Any) -> tuple[list[Message], list[bool]]:
    """Messages as the template shall see them, and on which of them the loss is."""
    if not isinstance(value, list) or not value:
        raise BadRow("`messages` is not a list of messages, or empty")
    messages, wanted = [], []
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {number} is not an object with a `role`")
        # columnar files give every message every key; what is None was not there
        message = {key: item for key, item in message.items() if item is not None}
        if "content" not in message and "tool_calls" in message:
            message["content"] = ""
        if not isinstance(message.get("content"), str):
            raise BadRow(f"`content` of message {number} is {type(message.get('content')).__name__}, not a string")
        loss = message.pop("loss", message["role"] == "assistant")
        if not isinstance(loss, bool):
            raise BadRow(f"`loss` of message {number} is {loss!r}, not true or false")
        messages.append(message)
        wanted.append(loss)
    return messages, wanted


class ChatTemplate:
    """A chat template with the tools of one row: finds the characters of a rendered conversation the loss is on."""

    def __init__(self, source: str, tools: list[Any] | None, special_tokens: dict[str, Any]) -> None:
        self.source, self.tools, self.special_tokens = source, tools, special_tokens

    def render(self, *conversations: list[Message], prompt: bool = False) -> list[str]:
        return self._render(list(conversations), add_generation_prompt=prompt)[0]

    def _render(self, conversations: list[list[Message]], **options: Any) -> tuple[list[str], list[list[Span]]]:
        written: Any = render_jinja_template(  # its annotation (str) is not what it returns
            conversations, tools=self.tools, chat_template=self.source, **options, **self.special_tokens
        )
        return written  # type: ignore[no-any-return]

    def target_spans(self, messages: list[Message], wanted: list[bool]) -> tuple[str, list[Span]]:
        """The rendered conversation, and the spans of the wanted messages in it."""
        if GENERATION_TAG.search(self.source):
            (text,), (tagged,) = self._render([messages], return_assistant_tokens_mask=True)
            assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if all(wanted[i] for i in assistants):
                spans = list(tagged)
            elif len(tagged) == len(assistants):
                spans = [span for span, i in zip(tagged, assistants, strict=True) if wanted[i]]
            else:
                raise BadRow(
                    f"the chat template tags {len(tagged)} generations in {len(assistants)} assistant messages"
                )
            others = [i for i in range(len(messages)) if wanted[i] and i not in assistants]
            return text, spans + self.probe(messages, others, text, header="")

        text = self.render(messages)[0]
        turns = [i for i, want in enumerate(wanted) if want]
        header, found = self.prefix_spans(messages, [i for i in turns if messages[i]["role"] == "assistant"], text)
        gaps = [i for i in turns if i not in found]
        return text, [*found.values(), *self.probe(messages, gaps, text, header)]

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
        try:
            befores = self.render(*(messages[:i] for i in turns), prompt=True)
            unprompted, *afters = self.render(messages[: turns[0]], *(messages[: i + 1] for i in turns))
        except TEMPLATE_ERRORS:
            return "", {}
        header = befores[0].removeprefix(unprompted) if befores[0].startswith(unprompted) else ""
        found = {
            i: (len(before), len(after))
            for i, before, after in zip(turns, befores, map(str.rstrip, afters), strict=True)
            if header and before.endswith(header) and after.startswith(before) and text.startswith(after)
        }
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


def tokens_of_spans(offsets: list[Span], spans: list[Span]) -> list[Span]:
    """Ranges of the tokens that have a character in a span.

    Offsets may leave out the white space around a token, and the bytes of one character may be several tokens: a token
    begins where the one before it ends, or earlier.
    """

    def begin(token: int) -> int:
        return min(offsets[token][0], offsets[token - 1][1] if token else 0)

    return [
        (bisect_right(offsets, start, key=lambda offset: offset[1]), bisect_left(range(len(offsets)), stop, key=begin))
        for start, stop in spans
        if start < stop
    ]
