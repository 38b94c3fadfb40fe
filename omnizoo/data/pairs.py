"""Preference pairs: a row with a `chosen` and a `rejected` answer becomes two conversations with the same prompt."""

from dataclasses import dataclass
from typing import Any

from omnizoo.data.messages import CALLS, SPEAKERS
from omnizoo.data.rows import PROMPTS, SIDES, BadRow, Row

ABOUT_LOSS = ("loss", "train", "weight")  # keys of a message
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """A row with `messages`, of which the last are the answer; or with a `text`, which begins with `prompt`."""

    row: Row
    prompt: str = ""


def sides_of(given: Row) -> list[Side]:
    """What a pair says, `given`, as two rows: with the chosen answer and with the rejected one."""
    for side in SIDES:
        if side not in given:
            raise BadRow(f"a preference pair needs `chosen` and `rejected`; this row has no `{side}`")
    found = [name for name in PROMPTS if name in given]
    if len(found) > 1:
        raise BadRow(f"it has `{found[0]}` and `{found[1]}`, and only one is read; name the other in data.ignore")
    prompt = given[found[0]] if found else None
    if given["chosen"] == given["rejected"]:
        raise BadRow("`chosen` and `rejected` are the same: nothing is preferred")
    others = (*SIDES, *PROMPTS, "text", "weight")  # the last two: left out by a pattern of data.ignore
    rest = {name: value for name, value in given.items() if name not in others}
    if isinstance(prompt, str) and all(isinstance(given[side], str) for side in SIDES):
        if rest.keys() & {"system", "tools"}:
            raise BadRow("a preference pair of plain texts has no `system` and no `tools`; write it as messages")
        return [Side({**rest, "text": prompt + given[side]}, prompt) for side in SIDES]
    answers = [_messages(given[side], "assistant", f"`{side}`") for side in SIDES]
    before = None if prompt is None else _messages(prompt, "user", f"`{found[0]}`")
    if not all(_is_answer(answer[0]) for answer in answers):
        before, answers = _with_prompts(answers, before, isinstance(prompt, str))
    if not before:
        raise BadRow("a preference pair needs a `prompt`, or `messages` that its answers follow")
    asked = [{key: value for key, value in m.items() if key not in ABOUT_LOSS} | {"loss": False} for m in before]
    return [Side({**rest, "messages": [*asked, *answer]}) for answer in answers]


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
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    shared = min(len(chosen), len(rejected)) if same is None else same
    answers = [conversation[shared:] for conversation in whole]
    if not all(answer and _is_answer(answer[0]) for answer in answers):
        raise BadRow(f"the prompts of `chosen` and `rejected` differ at message {shared}; a pair has one prompt")
    before = chosen[:shared]
    # A prompt that is a text is what the user says last.
    contents = [before[-1].get("content", before[-1].get("value"))] if is_text else before
    expected = [prompt[-1]["content"]] if is_text and prompt else prompt
    if expected is not None and contents != expected:
        raise BadRow("`prompt` is not what `chosen` and `rejected` begin with; a pair has one prompt")
    return before, answers
