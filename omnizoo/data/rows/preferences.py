"""Read preference rows: preference pairs, and labeled responses (KTO).

Each response is combined with the prompt of the row, so that it can be rendered like any other row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from omnizoo.data.row import CHAT_PROMPTS, PROMPTS, RESPONSES, SIDES, SINGLE, BadRow, Fix, Row
from omnizoo.data.rows.messages import CALLS, SPEAKERS, as_prompt
from omnizoo.data.rows.schemas import chat_prompt
from omnizoo.data.rows.unused_fields import REJECTED_RESPONSE

LABEL_ROLES = ("desirable", "undesirable")  # roles of labeled responses with the label true or false
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ResponseRow:
    """A row with a single response. The response consists of messages or of a plain text."""

    role: str  # one of `sample.ROLES`; empty without preferences
    row: Row
    prompt: str = ""  # beginning of a plain text, not trained on; the remaining text is the response
    messages: int = 0  # number of messages at the end that form the response; 0 for a plain text


@dataclass(frozen=True)
class PreferenceRow:
    """The prompt and responses of a preference row. They are either all plain texts or all messages."""

    prompt: str | Messages
    responses: dict[str, str | Messages]  # keyed by role
    other_fields: Row  # fields that apply to all responses, such as media and tools

    def with_response(self, role: str, response: str | Messages) -> ResponseRow:
        """Return a row that consists of the prompt and one response.

        Args:
            role: Role of the response.
            response: The response.
        """
        if isinstance(self.prompt, str):
            assert isinstance(response, str)
            return ResponseRow(role, {**self.other_fields, "text": self.prompt + response}, self.prompt)
        assert not isinstance(response, str)
        messages = [*as_prompt(self.prompt), *response]
        return ResponseRow(role, {**self.other_fields, "messages": messages}, messages=len(response))


def response_rows(present: Row, labeled_responses: bool = False) -> list[ResponseRow]:
    """Return one row for each response of a preference row.

    Args:
        present: The fields of the row that are not empty.
        labeled_responses: Whether a loss uses labeled responses. The responses of a pair then have the roles
            `desirable` and `undesirable` instead of `chosen` and `rejected`.

    Raises:
        BadRow: If the row is not a valid preference row.
    """
    row = _read(present, labeled_responses)
    return [row.with_response(role, response) for role, response in row.responses.items()]


def mismatched_rows(present: Row, other: Row) -> list[ResponseRow]:
    """Combine the prompt of a row with each response of another row, for the KTO baseline.

    Args:
        present: The fields of the row that are not empty.
        other: The fields of the other row that are not empty.

    Raises:
        BadRow: If the rows have the same prompt, or if one has plain texts and the other messages.
    """
    row = _read(present, labeled_responses=True)
    other_row = _read(other, labeled_responses=True)
    if type(row.prompt) is not type(other_row.prompt):
        raise BadRow("one of the two rows has plain texts, but the other one has messages")
    if is_same(row.prompt, other_row.prompt):
        raise BadRow("the other row has the same prompt")
    return [row.with_response("mismatched", response) for response in other_row.responses.values()]


def _read(present: Row, labeled_responses: bool) -> PreferenceRow:
    """Read the prompt and the responses of a preference row."""
    if not any(name in present for name in SIDES):
        present = _with_last_response(present)
    present = _with_chat_prompt(present)
    prompt_fields = [name for name in PROMPTS if name in present]
    if len(prompt_fields) > 1:
        names = f"`{prompt_fields[0]}` and `{prompt_fields[1]}`"
        message = f"{names} are present, but only one can be used. Add the other to data.ignore."
        raise BadRow(message, _fix_of_copies(present, prompt_fields))
    prompt = present[prompt_fields[0]] if prompt_fields else None
    response_fields = _response_fields(present, labeled_responses)
    # Drop `text` and `weight` as well: they can only be in the row if a pattern of data.ignore matches them.
    known_fields = (*SIDES, *SINGLE, *PROMPTS, *RESPONSES, REJECTED_RESPONSE, "text", "weight")
    other_fields = {name: value for name, value in present.items() if name not in known_fields}

    if isinstance(prompt, str) and all(isinstance(present[name], str) for name in response_fields.values()):
        if other_fields.keys() & {"system", "tools"}:
            raise BadRow("`system` and `tools` need messages, but the preference row has plain texts. Use messages.")
        texts = {role: present[name] for role, name in response_fields.items()}
        return PreferenceRow(prompt, texts, other_fields)

    responses = [_messages(present[name], "assistant", f"`{name}`") for name in response_fields.values()]
    prompt_messages = None if prompt is None else _messages(prompt, "user", f"`{prompt_fields[0]}`")
    if not all(_is_response(messages[0]) for messages in responses):
        if len(responses) == 1:
            raise BadRow(
                "`completion` does not begin with an assistant message. Move the messages before it to `prompt`."
            )
        prompt_messages, responses = _split_prompt(responses, prompt_messages, isinstance(prompt, str))
    if not prompt_messages:
        raise BadRow("a preference row needs `prompt`, or `messages` before the responses")
    return PreferenceRow(prompt_messages, dict(zip(response_fields, responses, strict=True)), other_fields)


def _with_last_response(present: Row) -> Row:
    """Move the response of a row, and the rejected alternative if there is one, to the fields of preference rows.

    The response consists of the last messages of the assistant in `messages` or `conversations`, or it is the text of
    an instruction row. If the row has a `rejected_response`, the response is moved to `chosen` and the rejected
    response to `rejected`. Otherwise, the response is moved to `completion`.

    Raises:
        BadRow: If the row has several responses, or messages without a response at the end.
    """
    name = "chosen" if REJECTED_RESPONSE in present else "completion"
    fields = [field for field in RESPONSES if field in present]
    if len(fields) > 1:
        raise BadRow(f"`{fields[0]}` and `{fields[1]}` are present. Add one of them to data.ignore.")
    if fields:
        others = {key: value for key, value in present.items() if key != fields[0]}
        changed = others | {name: present[fields[0]]}
    else:
        changed = _with_split_messages(present, name)
    if REJECTED_RESPONSE in changed:
        changed["rejected"] = changed.pop(REJECTED_RESPONSE)
    return changed


def _with_split_messages(present: Row, name: str) -> Row:
    """Move the last messages of the assistant to the field `name`. The other messages stay, as the prompt."""
    for field in ("messages", "conversations"):
        messages = present.get(field)
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            num_prompt = len(messages)
            while num_prompt and _is_response(messages[num_prompt - 1]):
                num_prompt -= 1
            if num_prompt == len(messages):
                raise BadRow(f"`{field}` does not end with a response of the assistant")
            return present | {field: messages[:num_prompt], name: messages[num_prompt:]}
    return dict(present)


def _with_chat_prompt(present: Row) -> Row:
    """Convert the prompt of an instruction row (`instruction`, `query`, `history`, ...) to messages in `prompt`."""
    fields = [name for name in CHAT_PROMPTS if name in present]
    if not fields or fields == ["history"]:
        return present
    if any(name in present for name in PROMPTS):
        raise BadRow(f"`{fields[0]}` and another prompt are present. Add one of them to data.ignore.")
    if "query" in fields and ("instruction" in fields or "input" in fields):
        raise BadRow("`query` and `instruction` or `input` are present. Add one of them to data.ignore.")
    others = {name: value for name, value in present.items() if name not in CHAT_PROMPTS}
    return others | {"prompt": chat_prompt(present)}


def _fix_of_copies(present: Row, prompt_fields: list[str]) -> list[Fix]:
    """Return a fix that drops prompt fields which only repeat the field `chosen`."""
    copies = [name for name in prompt_fields if is_same(present[name], present.get("chosen"))]
    return [Fix("data.ignore", copies, "a copy of `chosen`")] if copies else []


def _response_fields(present: Row, labeled_responses: bool) -> dict[str, str]:
    """Return the name of the field that contains each response, keyed by the role of the response.

    Raises:
        BadRow: If a field is missing, the label is not a boolean, or both responses of a pair are the same.
    """
    is_labeled = labeled_responses and not any(name in present for name in SIDES)
    kind = "labeled response" if is_labeled else "preference pair"
    required = SINGLE if is_labeled else SIDES
    for name in required:
        if name not in present:
            raise BadRow(f"a {kind} needs `{required[0]}` and `{required[1]}`, but `{name}` is missing")
    if is_labeled:
        label = present["label"]
        if not isinstance(label, bool):
            raise BadRow(f"`label` is {label!r}; expected true (a desirable response) or false")
        return {LABEL_ROLES[not label]: "completion"}
    if is_same(present["chosen"], present["rejected"]):
        raise BadRow("`chosen` and `rejected` are identical, so the row expresses no preference")
    roles = LABEL_ROLES if labeled_responses else SIDES
    return dict(zip(roles, SIDES, strict=True))


def _messages(value: Any, role: str, what: str) -> Messages:
    """Convert a text, a message or a list of messages to a list of messages.

    Args:
        value: The value in the row.
        role: Role of the message that a text becomes.
        what: Name of the value, for the error message.

    Raises:
        BadRow: If the value has another form.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRow(f"{what} is {type(value).__name__}; expected a string, a message or a list of messages")
    return messages


def _is_response(message: dict[str, Any]) -> bool:
    """Whether a message is from the assistant."""
    speaker = message.get("role") or message.get("from")
    return speaker in CALLS or SPEAKERS.get(str(speaker), speaker) == "assistant"


def _split_prompt(
    conversations: list[Messages], prompt: Messages | None, is_text: bool
) -> tuple[Messages, list[Messages]]:
    """Split two conversations into their common beginning (the prompt) and the two responses.

    Args:
        conversations: The conversations `chosen` and `rejected`.
        prompt: The prompt field of the row as messages. It must equal the common beginning. None if there is no such
            field.
        is_text: Whether the prompt field is a string. It is then compared with the last message of the beginning only.

    Returns:
        The prompt, and the two responses.

    Raises:
        BadRow: If the conversations have different prompts.
    """
    chosen, rejected = conversations
    num_shared = 0
    while num_shared < min(len(chosen), len(rejected)) and is_same(chosen[num_shared], rejected[num_shared]):
        num_shared += 1
    responses = [conversation[num_shared:] for conversation in conversations]
    if not all(response and _is_response(response[0]) for response in responses):
        raise BadRow(
            f"the prompts of `chosen` and `rejected` differ at message {num_shared}, but a pair must have one prompt"
        )

    shared_prompt = chosen[:num_shared]
    # A prompt that is a string is compared with the last message of the common beginning.
    last_message = shared_prompt[-1] if is_text else {}
    actual = [last_message.get("content", last_message.get("value"))] if is_text else shared_prompt
    expected = [prompt[-1]["content"]] if is_text and prompt else prompt
    if expected is not None and not is_same(actual, expected):
        raise BadRow("`prompt` differs from the beginning of `chosen` and `rejected`, but a pair must have one prompt")
    return shared_prompt, responses


def is_same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal. Arrays may contain media, and are compared by content."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if hasattr(first, "__array__") or hasattr(second, "__array__"):
        return type(first) is type(second) and np.array_equal(np.asarray(first), np.asarray(second))
    return bool(first == second)
