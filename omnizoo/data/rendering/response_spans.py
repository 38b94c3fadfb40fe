"""Find the characters of a rendered conversation that are targets: the text that the model generates.

Some templates mark the text of the assistant with {% generation %} tags. For other templates, the text of each message
(its turn) is found with marks that the loop over the messages writes (`template_sandbox.py`). A response begins where
its turn differs from the generation prompt, and ends at the end of the turn.

The result is checked by rendering the conversation again with the data of the messages replaced by marks. The span of
a response must contain all marks of its message.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix

from omnizoo.data.rendering.chat_template import ChatTemplate, TemplateRefusal
from omnizoo.data.rendering.marked_messages import CALL, Mark, find_marks, mark_messages, unused_mark
from omnizoo.data.rendering.template_sandbox import REASONING, Span
from omnizoo.data.row import BadRow
from omnizoo.data.rows.messages import Message

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
UNFINISHED_TAG = re.compile(r"[<\[][^<>\[\]\s]*$")  # the beginning of a tag at the end of a text
Marked = tuple[str, list[Span | None], list[Mark]]  # a rendered text, the span of each message, and the marks in it
TAGS_HINT = "Add {% generation %} tags around the responses to the chat template."


def target_spans(
    template: ChatTemplate, messages: list[Message], weights: Sequence[float]
) -> tuple[str, list[tuple[Span, float]]]:
    """Render a conversation, and find the characters that are targets.

    Args:
        template: The chat template.
        messages: The messages, without the keys that set loss weights.
        weights: The loss weight of each message; 0 if it is not trained on.

    Returns:
        The text, and the span and the weight of each message with a nonzero weight.

    Raises:
        BadRow: If the template rejects the messages, or the span of a message is ambiguous.
    """
    if GENERATION_TAG.search(template.source):
        return _tagged_spans(template, messages, weights)
    text = template.render(messages)
    trained = [i for i, weight in enumerate(weights) if weight]
    responses = [i for i in trained if messages[i]["role"] == "assistant"]
    spans = ResponseFinder(template, messages, text).find(responses)
    others = [i for i in trained if i not in spans]
    spans |= zip(others, probe(template, messages, others, text, header=""), strict=True)
    return text, [(spans[i], weights[i]) for i in trained]


def _tagged_spans(
    template: ChatTemplate, messages: list[Message], weights: Sequence[float]
) -> tuple[str, list[tuple[Span, float]]]:
    """Implement `target_spans` for a template with {% generation %} tags."""
    text, tagged = template.render_tagged(messages)
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
    spans = probe(template, messages, others, text, header="")
    targets += [(span, weights[i]) for i, span in zip(others, spans, strict=True)]
    return text, targets


class ResponseFinder:
    """Finds the spans of the assistant messages in one rendered conversation.

    Args:
        template: The chat template.
        messages: The messages, without the keys that set loss weights.
        text: The rendered conversation.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message], text: str) -> None:
        self.template = template
        self.messages = messages
        self.text = text
        self.word = unused_mark(text)

    def find(self, responses: list[int]) -> dict[int, Span]:
        """Return the span of each response, keyed by the index of its message.

        Args:
            responses: Indices of the assistant messages to find.

        Raises:
            BadRow: If a span is ambiguous, or does not contain all data of its message.
        """
        if not responses:
            return {}
        turns = self.template.turns_of(self.messages, self.text)
        spans = {}
        for i in responses:
            turn = turns[i]
            start = self._start(i, turn) if turn is not None else None
            if turn is not None and start is not None:
                spans[i] = (start, max(start, turn[0] + len(self.text[turn[0] : turn[1]].rstrip())))
        for i in self._shared_turns(list(spans)):
            spans[i] = self._without_later_messages(i, spans[i][0])
        self._check_marks(spans, turns)

        missing = [i for i in responses if i not in spans]
        return spans | self._find_by_prefixes(missing)

    def _start(self, i: int, turn: Span) -> int | None:
        """Return the character where response `i` begins: where its turn differs from the prompt of the model.

        Args:
            i: Index of the message.
            turn: Span of the message, with its header.

        Returns:
            The index of the character; None if it is unknown.
        """
        if i == 0:  # most templates cannot render an empty conversation
            return None
        begin, end = turn
        try:
            prompt = self.template.render(self.messages[:i], prompt=True)
            if prompt.startswith(self.text[:begin]):
                header = prompt[begin:]
            else:  # the template writes earlier turns differently before a generation prompt
                unprompted = self.template.render(self.messages[:i])
                if not prompt.startswith(unprompted):
                    return None
                header = prompt.removeprefix(unprompted)
        except TemplateRefusal:
            return None
        if not header:
            return self._start_of_data(i, turn)
        written = self.text[begin:end]
        shared = len(_shared_prefix([written, header]))
        if header.strip() and not written[:shared].strip():
            index = written.find(header)
            return None if index < 0 else begin + index + len(header)
        return begin + shared

    def _start_after_prefix(self, i: int) -> int | None:
        """Return the character where response `i` begins, without using its turn.

        The conversation up to the response, with a generation prompt, is compared with the whole text. Return None if
        the text does not begin with the conversation up to the response.
        """
        try:
            prompt = self.template.render(self.messages[:i], prompt=True)
            unprompted = self.template.render(self.messages[:i])
        except TemplateRefusal:
            return None
        if not self.text.startswith(unprompted) or not prompt.startswith(unprompted):
            return None
        start = len(_shared_prefix([self.text, prompt]))
        return start if start > len(unprompted) else None

    def _start_of_data(self, i: int, turn: Span) -> int:
        """Return the character where response `i` begins, for a template without a generation prompt.

        The header of a response is the text that stays the same if the data of the message is replaced, or if its tool
        calls and its reasoning are removed. The response begins after this header.
        """
        message = self.messages[i]
        plain = {name: value for name, value in message.items() if name not in (*REASONING, "tool_calls")}
        plain["content"] = self.word
        marked = mark_messages(self.messages, [i], self.word)[i]
        texts = [self.text[slice(*turn)]]
        for variant in (plain, marked):
            try:
                text, turns = self.template.render_turns([*self.messages[:i], variant, *self.messages[i + 1 :]])
            except TemplateRefusal:
                return turn[0]
            span = turns[i]
            if span is None:
                return turn[0]
            texts.append(text[slice(*span)])
        return turn[0] + len(_shared_prefix(texts))

    @cached_property
    def all_marked(self) -> Marked | None:
        """The conversation rendered with marks in all messages; None if the template rejects it."""
        try:
            return self._marked(range(len(self.messages)))
        except TemplateRefusal:
            return None

    def _marked(self, numbers: Sequence[int], stop: int | None = None) -> Marked:
        """Replace the data of some messages with marks, and render the conversation.

        Args:
            numbers: Indices of the messages to mark.
            stop: Number of messages to render, from the first one; None for all.
        """
        marked = mark_messages(self.messages, numbers, self.word)[:stop]
        text, turns = self.template.render_turns(marked)
        return text, turns, find_marks(text, self.word)

    def _shared_turns(self, responses: list[int]) -> list[int]:
        """Return the responses whose turns also contain later messages, such as results of tool calls.

        Raises:
            BadRow: If a turn contains data of its own message after a later message.
        """
        if self.all_marked is None:
            return []
        _, turns, marks = self.all_marked
        shared = []
        for i in responses:
            turn = turns[i]
            if turn is None:
                continue
            authors = [mark.message for mark in marks if turn[0] <= mark.start < turn[1]]
            written = [position for position, author in enumerate(authors) if author == i]
            others = [position for position, author in enumerate(authors) if author != i]
            if written and others and others[0] < written[-1]:
                raise BadRow(f"the chat template writes message {authors[others[0]]} inside message {i}. {TAGS_HINT}")
            if others:
                shared.append(i)
        return shared

    def _without_later_messages(self, i: int, start: int) -> Span:
        """Return the span of response `i` if its turn also contains later messages."""
        text, _, marks = self._marked([i])
        beginning, _, marks_of_beginning = self._marked([i], stop=i + 1)
        if not marks or len(marks) != len(marks_of_beginning):
            raise _ambiguous(i)
        after = text[marks[-1].stop :]
        after_in_beginning = beginning[marks_of_beginning[-1].stop :]
        end_of_turn = commonprefix([after, after_in_beginning]).rstrip()  # noqa: RUF071 (no paths)
        stop = len(self.text) - len(after) + len(end_of_turn)
        if not self.text.endswith(after) or stop < start:
            raise _ambiguous(i)
        return start, stop

    def _check_marks(self, spans: dict[int, Span], turns: list[Span | None]) -> None:
        """Check that each span contains all data of its message.

        The data of the messages is replaced with marks, and the conversation is rendered again. All marks of a message
        must be inside its span.

        Args:
            spans: The span of each response, keyed by the index of its message.
            turns: The span of each message with its header.

        Raises:
            BadRow: If a mark is outside the span of its message.
        """
        if not spans or self.all_marked is None or not self._find_scattered(self.all_marked, spans, turns):
            return
        # Marks in other messages may change how the template writes a response. Check again with marks in the responses
        # only.
        try:
            scattered = self._find_scattered(self._marked(list(spans)), spans, turns)
        except TemplateRefusal:
            return
        if scattered:
            raise _scattered(scattered[0], self.messages[scattered[0]])

    def _find_scattered(self, marked: Marked, spans: dict[int, Span], turns: list[Span | None]) -> list[int]:
        """Return the responses that have marks outside their spans.

        Args:
            marked: The rendered conversation with marks.
            spans: The span of each response in the conversation without marks.
            turns: The span of each message in the conversation without marks.
        """
        text, marked_turns, marks = marked
        scattered = []
        for i, (start, stop) in spans.items():
            marks_of_response = [mark for mark in marks if mark.message == i]
            turn = turns[i]
            marked_turn = marked_turns[i]
            if not marks_of_response:
                continue  # the template drops the message; `Conventions.check` reports this
            assert turn is not None
            header = self.text[turn[0] : start]
            if marked_turn is None or not text.startswith(header, marked_turn[0]):
                scattered.append(i)
                continue
            first, last = marked_turn[0] + len(header), marked_turn[1]
            if stop < turn[0] + len(self.text[turn[0] : turn[1]].rstrip()):  # the turn contains later messages
                last = len(text) - (len(self.text) - stop)
            if any(not first <= mark.start < last for mark in marks_of_response):
                scattered.append(i)
        return scattered

    def _find_by_prefixes(self, responses: list[int]) -> dict[int, Span]:
        """Find responses whose turns are unknown, by rendering prefixes and variants of the conversation."""
        if not responses:
            return {}
        header, spans = prefix_spans(self.template, self.messages, responses, self.text)
        for i in responses:
            start = self._start_after_prefix(i) if i not in spans else None
            if start is not None:
                spans[i] = self._without_later_messages(i, start)
        missing = [i for i in responses if i not in spans]
        spans |= zip(missing, probe(self.template, self.messages, missing, self.text, header), strict=True)
        for i, (start, stop) in spans.items():
            try:
                text, _, marks = self._marked([i])
            except TemplateRefusal:
                continue
            after = text[marks[-1].stop :] if marks else ""
            before = text[: marks[0].start] if marks else ""
            is_known = self.text.startswith(before) and self.text.endswith(after)
            if marks and not (is_known and start <= len(before) and len(self.text) - len(after) <= stop):
                raise _scattered(i, self.messages[i])
        return spans


def _shared_prefix(texts: list[str]) -> str:
    """Return the beginning that all texts share. It does not end inside a tag such as `<think>` or `[CALL]`."""
    prefix = commonprefix(texts)  # noqa: RUF071 (no paths)
    tag = UNFINISHED_TAG.search(prefix)
    return prefix if prefix in texts or tag is None else prefix[: tag.start()]


def _ambiguous(number: int) -> BadRow:
    """Return the error for a message whose span cannot be determined."""
    return BadRow(f"the position of message {number} in the chat template's output is ambiguous. {TAGS_HINT}")


def _scattered(number: int, message: Message) -> BadRow:
    """Return the error for a message with data outside its span."""
    return BadRow(
        f"the chat template writes parts of message {number} ({message['role']}) in several places. {TAGS_HINT}"
    )


def prefix_spans(
    template: ChatTemplate, messages: list[Message], turns: list[int], text: str
) -> tuple[str, dict[int, Span]]:
    """Find the spans of assistant messages by rendering prefixes of the conversation.

    The span of a message begins where the generation prompt ends, and ends where the conversation up to this message
    ends. The span is found only if both of these texts are prefixes of the whole text. This is not the case if the
    template writes earlier turns differently. The span is also not found if the generation prompt adds no header,
    because the text before the content may then be a header or a part of the response.

    Args:
        template: The chat template.
        messages: All messages.
        turns: Indices of the assistant messages to find.
        text: The rendered conversation.

    Returns:
        The header that the generation prompt adds, and the span of each message that was found, keyed by its index.
    """
    turns = [i for i in turns if i > 0]  # most templates cannot render an empty conversation
    header = ""
    spans: dict[int, Span] = {}
    try:
        for i in turns:
            before = template.render(messages[:i], prompt=True)
            if i == turns[0]:
                unprompted = template.render(messages[:i])
                header = before.removeprefix(unprompted) if before.startswith(unprompted) else ""
            after = template.render(messages[: i + 1]).rstrip()
            ends_with_header = bool(header) and before.endswith(header)
            if ends_with_header and after.startswith(before) and text.startswith(after):
                spans[i] = (len(before), len(after))
    except TemplateRefusal:
        return "", {}
    return header, spans


def probe(template: ChatTemplate, messages: list[Message], turns: list[int], text: str, header: str) -> list[Span]:
    """Find the spans of messages by rendering the conversation with a mark in place of their content.

    Args:
        template: The chat template.
        messages: All messages.
        turns: Indices of the messages to find.
        text: The rendered conversation.
        header: The header that the generation prompt adds; "" if unknown.

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
    skeleton = template.render(marked)
    spans = []
    for i in turns:
        conversation = template.render([*messages[:i], marked[i], *messages[i + 1 :]])
        beginning = template.render([*messages[:i], marked[i]])
        before, mark, after = conversation.partition(marks[i])
        # The text after the content that does not depend on later messages is the end of the turn, such as <|im_end|>.
        after_in_beginning = beginning.partition(marks[i])[2]
        end_of_turn = commonprefix([after, after_in_beginning]).rstrip()  # noqa: RUF071 (no paths)
        stop = len(text) - len(after) + len(end_of_turn)
        # Text that the template writes between header and content, such as an empty think block, is also a target.
        start = len(before)
        between = skeleton.partition(marks[i])[0]
        if i > 0:
            between = between.rpartition(marks[i - 1])[2]
        if header and header in between and before.endswith(between):
            start -= len(between) - between.rindex(header) - len(header)

        is_unchanged = text.startswith(before[:start]) and text.endswith(after)
        if not mark or not is_unchanged or start > stop:
            raise _ambiguous(i)
        spans.append((start, stop))
    return spans


def check_calls(template: ChatTemplate, messages: list[Message]) -> None:
    """Check that the template writes the arguments of all tool calls. Raises `BadRow` if it does not."""
    callers = [i for i, message in enumerate(messages) if "tool_calls" in message]
    if not callers:
        return
    word = unused_mark(repr(messages))
    marked = mark_messages(messages, callers, word)
    written = {(mark.message, mark.call) for mark in find_marks(template.render(marked), word) if mark.kind == CALL}
    for i in callers:
        for mark in find_marks(repr(marked[i]), word):
            if mark.kind == CALL and (i, mark.call) not in written:
                raise BadRow(
                    f"the chat template drops the arguments of call {mark.call} of message {i}. Use another template."
                )
