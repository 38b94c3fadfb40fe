"""Read preference rows: each response of a pair, or the labeled response, becomes a conversation with its prompt."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from omnizoo.data.row import PROMPTS, SIDES, SINGLE, BadRow, Row
from omnizoo.data.rows.messages import CALLS, SPEAKERS, as_prompt

PAIR = "a preference pair needs `chosen` and `rejected`"
DESIRED = ("desirable", "undesirable")  # roles of labeled responses, as KTO uses them
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ResponseRow:
    """A row with a single response: `messages` that end with the response, or a `text` that begins with `prompt`."""

    role: str  # one of `sample.ROLES`; empty without preferences
    row: Row
    prompt: str = ""
    messages: int = 0  # number of last messages that form the response; 0 for a `text`


@dataclass(frozen=True)
class PreferenceRow:
    """The prompt and responses of a preference row, all plain texts or all messages."""

    prompt: str | Messages
    answers: dict[str, str | Messages]  # responses by role
    rest: Row  # other fields, which apply to each response: media, tools, ...

    def side(self, role: str, answer: str | Messages) -> ResponseRow:
        """Return the row of one response: the prompt, followed by the response."""
        if isinstance(self.prompt, str):
            assert isinstance(answer, str)
            return ResponseRow(role, {**self.rest, "text": self.prompt + answer}, self.prompt)
        assert not isinstance(answer, str)
        messages = [*as_prompt(self.prompt), *answer]
        return ResponseRow(role, {**self.rest, "messages": messages}, messages=len(answer))


def sides_of(given: Row, singles: bool = False) -> list[ResponseRow]:
    """Return one row for each response of a preference row.

    Args:
        given: The non-empty fields of the row.
        singles: Whether labeled responses are accepted. The responses of a pair then get the roles `DESIRED`.

    Raises:
        BadRow: If the row is not a valid preference.
    """
    row = _read(given, singles)
    return [row.side(role, answer) for role, answer in row.answers.items()]


def mismatched_sides(given: Row, other: Row) -> list[ResponseRow]:
    """Return the prompt of `given` with each response of the row `other`, for the KTO baseline.

    Raises:
        BadRow: If the rows have the same prompt, or if one has plain texts and the other messages.
    """
    own, there = (_read(row, singles=True) for row in (given, other))
    if type(own.prompt) is not type(there.prompt):
        raise BadRow("one of them is of plain texts, the other of messages")
    if is_same(own.prompt, there.prompt):
        raise BadRow("the other row has the same prompt")
    return [own.side("mismatched", answer) for answer in there.answers.values()]


def _read(given: Row, singles: bool) -> PreferenceRow:
    """Read the prompt and the responses of a preference row."""
    found = [name for name in PROMPTS if name in given]
    if len(found) > 1:
        raise BadRow(f"it has `{found[0]}` and `{found[1]}`, and only one is read; name the other in data.ignore")
    prompt, names = given[found[0]] if found else None, _answers(given, singles)
    # `text` and `weight` are in the row only if a pattern of data.ignore matches them.
    others = (*SIDES, *SINGLE, *PROMPTS, "text", "weight")
    rest = {name: value for name, value in given.items() if name not in others}
    if isinstance(prompt, str) and all(isinstance(given[name], str) for name in names.values()):
        if rest.keys() & {"system", "tools"}:
            raise BadRow("a preference pair of plain texts has no `system` and no `tools`; write it as messages")
        return PreferenceRow(prompt, {role: given[name] for role, name in names.items()}, rest)
    answers = [_messages(given[name], "assistant", f"`{name}`") for name in names.values()]
    before = None if prompt is None else _messages(prompt, "user", f"`{found[0]}`")
    if not all(_is_answer(answer[0]) for answer in answers):
        if len(answers) == 1:
            raise BadRow("`completion` does not begin with a message of the assistant's; what comes before is `prompt`")
        before, answers = _with_prompts(answers, before, isinstance(prompt, str))
    if not before:
        raise BadRow("a preference pair needs a `prompt`, or `messages` that its answers follow")
    return PreferenceRow(before, dict(zip(names, answers, strict=True)), rest)


def _answers(given: Row, singles: bool) -> dict[str, str]:
    """Return the field of each response, by role."""
    is_single = singles and not any(side in given for side in SIDES)
    for name in SINGLE if is_single else SIDES:
        if name not in given:
            what = "a single answer needs `completion` and `label`" if is_single else PAIR
            raise BadRow(f"{what}; this row has no `{name}`")
    if is_single:
        if not isinstance(given["label"], bool):
            raise BadRow(f"`label` is {given['label']!r}; expected true (a good answer) or false")
        return {DESIRED[not given["label"]]: "completion"}
    if is_same(given["chosen"], given["rejected"]):
        raise BadRow("`chosen` and `rejected` are the same: nothing is preferred")
    return dict(zip(DESIRED if singles else SIDES, SIDES, strict=True))


def _messages(value: Any, role: str, what: str) -> Messages:
    """Return a text, a message or a list of messages as a list. A text becomes a message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadRow(f"{what} is {type(value).__name__}, not a text, a message or a list of messages")
    return messages


def _is_answer(message: dict[str, Any]) -> bool:
    """Whether a message is from the assistant."""
    speaker = message.get("role") or message.get("from")
    return speaker in CALLS or SPEAKERS.get(str(speaker), speaker) == "assistant"


def _with_prompts(whole: list[Messages], prompt: Messages | None, is_text: bool) -> tuple[Messages, list[Messages]]:
    """Split two conversations into their common beginning, which is the prompt, and the two responses.

    Args:
        whole: The conversations `chosen` and `rejected`.
        prompt: The prompt field of the row, which must equal the common beginning; None if there is none.
        is_text: Whether that field is a string. It is then compared with the last message of the beginning only.

    Raises:
        BadRow: If the conversations have different prompts.
    """
    chosen, rejected = whole
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if not is_same(a, b)), None)
    shared = min(len(chosen), len(rejected)) if same is None else same
    answers = [conversation[shared:] for conversation in whole]
    if not all(answer and _is_answer(answer[0]) for answer in answers):
        raise BadRow(f"the prompts of `chosen` and `rejected` differ at message {shared}; a pair has one prompt")
    before = chosen[:shared]
    # A prompt that is a string is the last user message.
    contents = [before[-1].get("content", before[-1].get("value"))] if is_text else before
    expected = [prompt[-1]["content"]] if is_text and prompt else prompt
    if expected is not None and not is_same(contents, expected):
        raise BadRow("`prompt` is not what `chosen` and `rejected` begin with; a pair has one prompt")
    return before, answers


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of rows are equal. Arrays, which may contain media, are compared by content."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__array__") or hasattr(other, "__array__"):
        return type(one) is type(other) and np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
