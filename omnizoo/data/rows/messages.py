"""Convert the messages of a row, in any of several conventions, to the form that chat templates expect.

The conventions differ in roles, tools, tool calls and loss weights. `template_conventions.py` checks afterwards that
the chat template does not drop anything.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from omnizoo.data.row import BadRow
from omnizoo.data.rows.unused_fields import RowFields, is_empty

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
DEFAULT_WEIGHTS = {role: float(role == "assistant") for role in ROLES}  # loss weight of messages without loss keys
# Names of speakers in ShareGPT and similar formats, and the roles that they stand for.
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
}
WEIGHT_KEYS = ("weight", "loss_weight")  # keys of a message with a number as its loss weight
LOSS_KEYS = ("loss", "train", *WEIGHT_KEYS)  # all keys of a message that set its loss weight
REASONING_PARTS = ("reasoning", "thinking")  # types of content parts that contain reasoning of the assistant
CALL_PART = "tool_call"  # type of a content part that contains a tool call as JSON
CALLS = ("function_call", "tool_call")  # speakers whose content is a tool call of the assistant, as JSON
PLAIN = {"role", "content", "loss"}  # keys of a message that every chat template supports
MAX_WEIGHT = 1e6  # maximum loss weight of a message or row


class MessageRules(Protocol):
    """The properties of a chat template that are needed to convert messages. `Conventions` implements them."""

    def knows(self, role: str) -> bool:
        """Whether the template accepts messages of this role."""

    def role_of(self, speaker: str) -> str:
        """Return the role that the template uses for a speaker, such as "human"."""

    @property
    def takes_objects(self) -> bool:
        """Whether the template expects the arguments of tool calls as objects instead of JSON text."""


def read_messages(value: Any, field: str, system: Any, rules: MessageRules, fields: RowFields) -> list[Message]:
    """Convert messages to the form that the template expects, each with its loss weight as `loss`.

    Args:
        value: The messages in the row.
        field: Name of the field, for error messages.
        system: The `system` field of the row; None if there is none.
        rules: Properties of the chat template.
        fields: Determines which fields are ignored.

    Raises:
        BadRow: If the messages cannot be read.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{field}` is empty or not a list of messages")
    messages = [read_message(message, number, rules, fields) for number, message in enumerate(value)]
    return messages if system is None else with_system(messages, system)


def read_message(value: Any, number: int, rules: MessageRules, fields: RowFields) -> Message:
    """Convert one message to the form that the template expects, with its loss weight as `loss`.

    Args:
        value: The message in the row.
        number: Index of the message, for error messages.
        rules: Properties of the chat template.
        fields: Determines which fields are ignored.

    Raises:
        BadRow: If the message cannot be read.
    """
    if not isinstance(value, dict):
        raise BadRow(f"message {number} is not an object with a `role`")
    role = value.get("role")
    if len(value) == 2 and role in DEFAULT_WEIGHTS and isinstance(value.get("content"), str):
        # Return early for the most common kind of message.
        return {"role": role, "content": value["content"], "loss": DEFAULT_WEIGHTS[role]}

    # In columnar files, every message has the union of all keys, so a key with None counts as absent.
    present = {name: item for name, item in value.items() if item is not None}
    message: Message = {name: item for name, item in present.items() if name not in fields.ignored}
    _set_role(message, number, rules)
    if isinstance(message.get("content"), list):
        _read_parts(message, number)
    if "tool_calls" in message:
        message.setdefault("content", "")
        calls = read_list(message["tool_calls"], f"`tool_calls` of message {number}")
        if calls:
            message["tool_calls"] = [with_arguments(call, rules, number) for call in calls]
        else:
            del message["tool_calls"]
    message["loss"] = loss_weight(message, number)
    return {name: item for name, item in message.items() if name in PLAIN or not is_empty(item)}


def _set_role(message: Message, number: int, rules: MessageRules) -> None:
    """Convert the keys and speakers of other conventions to `role` and `content`, in place."""
    if "from" in message:
        duplicates = sorted(message.keys() & {"role", "content"})
        if duplicates:
            raise BadRow(f"message {number} has both `from` and `{duplicates[0]}`. Keep only one convention.")
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    speaker = message.get("role")
    if not isinstance(speaker, str):
        raise BadRow(f"message {number} is not an object with a `role`; it has {', '.join(map(repr, message))}")

    if speaker in CALLS and not rules.knows(speaker):
        calls = read_calls(message.get("content"), f"message {number} ({speaker})")
        message |= {"role": "assistant", "content": "", "tool_calls": calls}
    elif speaker not in ROLES:
        message["role"] = rules.role_of(speaker)
        if not rules.knows(message["role"]):
            raise BadRow(
                f"`role` of message {number} is {speaker!r}, which the chat template does not use. "
                f"Use one of {', '.join(ROLES)}."
            )


def _read_parts(message: Message, number: int) -> None:
    """Move reasoning and tool calls from the content parts of a message to keys that templates read, in place.

    A part such as `{"type": "text", "value": ...}`, as in LLaMA-Factory, becomes `{"type": "text", "text": ...}`.

    Raises:
        BadRow: If the parts are not in the order in which templates write them: reasoning, text and media, tool calls.
    """
    content: list[Any] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for i, part in enumerate(message["content"]):
        what = f"part {i} of message {number}"
        kind, value = _kind_and_value(part)
        if kind in REASONING_PARTS:
            if content or calls or reasoning:
                raise BadRow(f"{what} is {kind}, which only the first part of a message can be")
            reasoning.append(_assistant_text(message, value, what))
        elif kind == CALL_PART:
            calls += read_calls(_assistant_text(message, value, what), what)
        elif calls:
            raise BadRow(f"{what} follows a tool call, but chat templates write tool calls last")
        else:
            content.append(_with_named_value(part))
    new_fields = {"reasoning_content": "".join(reasoning), "tool_calls": calls}
    for name, value in new_fields.items():
        if value and name in message:
            raise BadRow(f"message {number} has both `{name}` and content parts for it. Keep one of them.")
        if value:
            message[name] = value
    message["content"] = content or ""


def _kind_and_value(part: Any) -> tuple[Any, Any]:
    """Return the type and the value of a content part.

    The value is in the key `value`, or in a key with the name of the type: `{"type": "text", "text": ...}`.
    """
    if not isinstance(part, dict):
        return None, None
    kind = part.get("type")
    value = part.get("value")
    return kind, part.get(kind) if value is None and isinstance(kind, str) else value


def _assistant_text(message: Message, value: Any, what: str) -> Any:
    """Return the value of a content part with reasoning or a tool call.

    Raises:
        BadRow: If the message is not from the assistant, or if the value is empty or has a wrong type.
    """
    if message["role"] != "assistant":
        raise BadRow(f"{what} is reasoning or a tool call, but the message is from {message['role']!r}")
    if not value or not isinstance(value, str | dict):
        raise BadRow(f"{what} is empty, or its type is {type(value).__name__}; expected a string or an object")
    return value


def _with_named_value(part: Any) -> Any:
    """Return a content part whose value is moved from the key `value` to the key that is named like its type."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part.get("value") is None:
        return part
    kind = part["type"]
    if part.get(kind) is not None:
        return part
    return {name: item for name, item in part.items() if name != "value"} | {kind: part["value"]}


def loss_weight(message: Message, number: int) -> float:
    """Remove the keys in `LOSS_KEYS` from a message, and return the loss weight that they set.

    `loss` and `train` are true or false, for a weight of 1 or 0. `weight` and `loss_weight` are numbers. Without any of
    these keys, the weight is 1 for assistant messages and 0 for others.

    Args:
        message: The message. It is changed in place.
        number: Index of the message, for error messages.

    Raises:
        BadRow: If a value is invalid, or if two keys contradict each other.
    """
    role = message["role"]
    flags = []
    weights = []
    for name in ("loss", "train"):
        if name in message:
            flag = message.pop(name)
            if not isinstance(flag, bool):
                raise BadRow(f"`{name}` of message {number} is {flag!r}; expected true or false")
            flags.append(flag)
    for name in WEIGHT_KEYS:
        if name in message:
            weight = read_weight(message.pop(name), f"`{name}` of message {number}")
            if weight and role != "assistant" and True not in flags:
                raise BadRow(
                    f"`{name}` of message {number} ({role}) is {weight:g}, but by default only assistant messages are "
                    "trained on. Add `loss: true` to the message to train on it."
                )
            weights.append(weight)
    flags += [weight > 0 for weight in weights]
    if len(set(flags)) > 1 or len(set(weights)) > 1:
        keys = ", ".join(f"`{name}`" for name in LOSS_KEYS)
        raise BadRow(f"two of {keys} of message {number} contradict each other. Keep one of them.")
    is_trained = flags[0] if flags else role == "assistant"
    return (weights[0] if weights else 1.0) if is_trained else 0.0


def read_weight(value: Any, what: str) -> float:
    """Return a loss weight as a float. Raises `BadRow` unless it is a number from 0 to `MAX_WEIGHT`.

    Args:
        value: The weight in the row.
        what: Name of the value, for the error message.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise BadRow(f"{what} is {str(value)[:80]!r}; expected a number from 0 to {MAX_WEIGHT:g}")
    return float(value)


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Return the messages with a system message at the start.

    Args:
        messages: The messages.
        system: The system prompt, from the field `system` of the row.

    Raises:
        BadRow: If the system prompt is not a string, or if the messages contain a different one.
    """
    if not isinstance(system, str):
        raise BadRow(f"`system` is {type(system).__name__}, not a string")
    system_contents = [message["content"] for message in messages if message["role"] == "system"]
    if system_contents and system_contents != [system]:
        raise BadRow("`system` differs from the system message of the row. Add `system` to data.ignore to drop it.")
    return messages if system_contents else [{"role": "system", "content": system, "loss": 0.0}, *messages]


def as_prompt(messages: Sequence[Message]) -> list[Message]:
    """Return copies of the messages that are not trained on, regardless of their loss keys."""
    prompt = []
    for message in messages:
        without_loss = {key: value for key, value in message.items() if key not in LOSS_KEYS}
        prompt.append(without_loss | {"loss": False})
    return prompt


def read_calls(value: Any, what: str) -> list[Any]:
    """Parse the tool calls in the content of a message or content part.

    Args:
        value: JSON text, or a value parsed from it: one call or a list of calls, each with `name` and `arguments`.
        what: Name of the value, for error messages.

    Returns:
        The tool calls in the form of the OpenAI API.
    """
    calls = parse(value, what)
    calls = calls if isinstance(calls, list) else [calls]
    tool_calls = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"{what} is not a tool call; expected an object with `name` and `arguments`")
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
        tool_calls.append({"type": "function", "function": function})
    return tool_calls


def with_arguments(call: Any, rules: MessageRules, number: int) -> Message:
    """Convert the arguments of a tool call to the form that the template expects: an object or JSON text.

    Args:
        call: The tool call.
        rules: Properties of the chat template.
        number: Index of the message, for error messages.
    """
    if not isinstance(call, dict):
        raise BadRow(f"`tool_calls` of message {number} contains {type(call).__name__}, not objects")
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": with_arguments(function, rules, number)}
    if "arguments" not in call:
        return call
    what = f"`arguments` of a call in message {number}"
    arguments = parse(call["arguments"], what)
    if not isinstance(arguments, dict):
        raise BadRow(f"{what} has the type {type(arguments).__name__}; expected an object")
    return {**call, "arguments": arguments if rules.takes_objects else json.dumps(arguments, ensure_ascii=False)}


def read_list(value: Any, what: str) -> list[Any]:
    """Return a value of a row as a list of objects.

    Args:
        value: A list of objects or a single object. The value, or each object in it, may be JSON text.
        what: Name of the value, for error messages.

    Raises:
        BadRow: If the value has another form.
    """
    if isinstance(value, str):
        value = parse(value, what) if value.strip() else []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(f"{what} is {type(value).__name__}, not a list")
    objects = [parse(item, what) for item in value]
    for item in objects:
        if not isinstance(item, dict):
            raise BadRow(f"{what} contains {type(item).__name__}, not objects")
    return objects


def parse(value: Any, what: str) -> Any:
    """Parse a string as JSON. Return other values unchanged.

    Args:
        value: The value.
        what: Name of the value, for the error message.

    Raises:
        BadRow: If the string is not valid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        hint = " (write it with json.dumps, not with Python's str)" if "'" in value else ""
        raise BadRow(f"{what} is a string that is not valid JSON: {str(error)[:200]}{hint}") from None


def check_names(functions: Sequence[Any], text: str, what: str) -> None:
    """Check that the name of each tool or tool call occurs in the rendered text.

    Args:
        functions: The tools or tool calls.
        text: The rendered conversation.
        what: Name of the list, for the error message.

    Raises:
        BadRow: If a name does not occur.
    """
    for function in functions:
        inner = function.get("function") if isinstance(function.get("function"), dict) else function
        name = inner.get("name")
        if isinstance(name, str) and name not in text:
            raise BadRow(f"the chat template drops {name!r} of {what}")
