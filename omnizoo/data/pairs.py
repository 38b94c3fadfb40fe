"""Rows with preferences: each answer, of a pair or a single one, becomes a conversation that begins with the prompt."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from omnizoo.data.messages import CALLS, SPEAKERS
from omnizoo.data.rows import PROMPTS, SIDES, SINGLE, BadRow, Row

ABOUT_LOSS = ("loss", "train", "weight")  # keys of a message
PAIR = "a preference pair needs `chosen` and `rejected`"
DESIRED = ("desirable", "undesirable")  # answers that are judged one by one
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """A row with `messages`, of which the last are the answer; or with a `text`, which begins with `prompt`."""

    role: str
    row: Row
    prompt: str = ""
    messages: int = 0  # how many of them are the answer


@dataclass(frozen=True)
class Preference:
    """What a row says, as plain texts or as messages."""

    prompt: str | Messages
    answers: dict[str, str | Messages]  # by role
    rest: Row  # what else goes with each answer: media, tools ...

    def sides(self) -> list[Side]:
        return [self.side(role, answer) for role, answer in self.answers.items()]

    def side(self, role: str, answer: str | Messages) -> Side:
        if isinstance(self.prompt, str):
            assert isinstance(answer, str)
            return Side(role, {**self.rest, "text": self.prompt + answer}, self.prompt)
        assert not isinstance(answer, str)
        told = ({key: value for key, value in m.items() if key not in ABOUT_LOSS} for m in self.prompt)
        messages = [*(message | {"loss": False} for message in told), *answer]
        return Side(role, {**self.rest, "messages": messages}, messages=len(answer))


def sides_of(given: Row, singles: bool = False) -> list[Side]:
    """What a row says, `given`, as one row for each of its answers. `singles`: they are judged one by one."""
    return _read(given, singles).sides()


def mismatched_sides(given: Row, other: Row) -> list[Side]:
    """The prompt of `given`, with the answers of a row that has another one."""
    own, there = (_read(row, singles=True) for row in (given, other))
    if type(own.prompt) is not type(there.prompt):
        raise BadRow("one of them is of plain texts, the other of messages")
    if is_same(own.prompt, there.prompt):
        raise BadRow("the other row has the same prompt")
    return [own.side("mismatched", answer) for answer in there.answers.values()]


def _read(given: Row, singles: bool) -> Preference:
    found = [name for name in PROMPTS if name in given]
    if len(found) > 1:
        raise BadRow(f"it has `{found[0]}` and `{found[1]}`, and only one is read; name the other in data.ignore")
    prompt, names = given[found[0]] if found else None, _answers(given, singles)
    others = (*SIDES, *SINGLE, *PROMPTS, "text", "weight")  # the last two: left out by a pattern of data.ignore
    rest = {name: value for name, value in given.items() if name not in others}
    if isinstance(prompt, str) and all(isinstance(given[name], str) for name in names.values()):
        if rest.keys() & {"system", "tools"}:
            raise BadRow("a preference pair of plain texts has no `system` and no `tools`; write it as messages")
        return Preference(prompt, {role: given[name] for role, name in names.items()}, rest)
    answers = [_messages(given[name], "assistant", f"`{name}`") for name in names.values()]
    before = None if prompt is None else _messages(prompt, "user", f"`{found[0]}`")
    if not all(_is_answer(answer[0]) for answer in answers):
        if len(answers) == 1:
            raise BadRow("`completion` does not begin with a message of the assistant's; what comes before is `prompt`")
        before, answers = _with_prompts(answers, before, isinstance(prompt, str))
    if not before:
        raise BadRow("a preference pair needs a `prompt`, or `messages` that its answers follow")
    return Preference(before, dict(zip(names, answers, strict=True)), rest)


def _answers(given: Row, singles: bool) -> dict[str, str]:
    """The roles of a row's answers, and the fields that they are in."""
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
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise BadRow(f"{what} is {type(value).__name__}, not a text, a message or a list of messages")
    return messages


def _is_answer(message: dict[str, Any]) -> bool:
    speaker = message.get("role") or message.get("from")
    return speaker in CALLS or SPEAKERS.get(str(speaker), speaker) == "assistant"


def _with_prompts(whole: list[Messages], prompt: Messages | None, is_text: bool) -> tuple[Messages, list[Messages]]:
    """Of whole conversations: what both begin with, and the two answers. It has to be the `prompt`, if there is one."""
    chosen, rejected = whole
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if not is_same(a, b)), None)
    shared = min(len(chosen), len(rejected)) if same is None else same
    answers = [conversation[shared:] for conversation in whole]
    if not all(answer and _is_answer(answer[0]) for answer in answers):
        raise BadRow(f"the prompts of `chosen` and `rejected` differ at message {shared}; a pair has one prompt")
    before = chosen[:shared]
    # A prompt that is a text is what the user says last.
    contents = [before[-1].get("content", before[-1].get("value"))] if is_text else before
    expected = [prompt[-1]["content"]] if is_text and prompt else prompt
    if expected is not None and not is_same(contents, expected):
        raise BadRow("`prompt` is not what `chosen` and `rejected` begin with; a pair has one prompt")
    return before, answers


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of rows are equal; arrays, which media may be given as, by what is in them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__array__") or hasattr(other, "__array__"):
        return type(one) is type(other) and np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
