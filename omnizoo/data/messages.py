"""Messages as other tools write them become messages as chat templates take them, and nothing in them gets lost.

Who speaks, tools and their calls, and on what the loss is are brought into one form. What a template leaves out (a
message, a field of one, the tools) is asked of the template itself: of its source, or by rendering it.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from omnizoo.data.row_fields import HARMLESS_IN_MESSAGE, Fields, says_nothing
from omnizoo.data.rows import BadRow
from omnizoo.data.template_facts import read_template

Message = dict[str, Any]
Render = Callable[[list[Message], list[Any] | None], str]  # of a conversation with tools

ROLES = ("system", "user", "assistant", "tool")
LEARNT = {role: role == "assistant" for role in ROLES}
# Names of speakers in ShareGPT and its kin. A template that has such a word of its own for tools keeps it.
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
CALLS = ("function_call", "tool_call")  # speakers whose words are the calls of an assistant, as JSON
REASONING = ("reasoning_content", "thinking", "reasoning")
TAIL = 64  # characters: a template may cut off what an answer begins with (its thinking), not how it ends
PLAIN = {"role", "content", "loss"}
MOST_WEIGHT = 1e6  # of a loss


class Conventions:
    """What one chat template does with messages. All of it is a function of the template alone: what is said of a row
    must not depend on the rows before it."""

    def __init__(self, source: str, render: Render) -> None:
        self.render, self.facts = render, read_template(source)
        self._is_written: dict[str, bool] = {}  # by role

    def knows(self, role: str) -> bool:
        return role in ROLES or role in self.facts.words

    def role_of(self, speaker: str) -> str:
        role = SPEAKERS.get(speaker, speaker)
        words = self.facts.words
        return speaker if role == "tool" and speaker in words and "tool" not in words else role

    @cached_property
    def takes_objects(self) -> bool:
        """Arguments of calls are objects to most templates; some want them as JSON text, as the OpenAI API has them."""
        return '"a1x"' in self._call({"a1x": "b"}) or "a1x" not in self._call('{"a1x": "b"}')

    def _call(self, arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function, **function}  # some know no `function`
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._try([{"role": "user", "content": "a"}, turn])

    def _try(self, messages: list[Message]) -> str:
        try:
            return self.render(messages, None)
        except BadRow:
            return ""

    def is_written(self, role: str) -> bool:
        """True if a message of this role is surely written, in a conversation that has one where it belongs."""
        if role not in self._is_written:
            turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            own: Message = {"role": role, "content": "mark0x"}
            place = {"user": [own, turns[1]], "assistant": [turns[0], own], "system": [own, *turns]}
            self._is_written[role] = "mark0x" in self._try(place.get(role, [turns[0], turns[1], own]))
        return self._is_written[role]

    def check(self, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        """`text` is all that is left of the messages; whatever is not in it is a bad row."""
        if tools:
            if "tools" not in self.facts.variables:
                raise BadRow("the chat template leaves out its `tools`")
            check_names(tools, text, "its `tools`")
        at, unsure = 0, []
        for number, message in enumerate(messages):
            if "tool_calls" in message:
                check_names(message["tool_calls"], text, f"the calls of message {number}")
            if not (content := message["content"].strip()):
                continue
            if not self.is_written(message["role"]):
                unsure.append(number)
            elif (found := text.find(content, at)) >= 0:
                at = found + len(content)
            elif len(content) > TAIL and (found := text.find(content[-TAIL:], at)) >= 0:
                at = found + TAIL
            else:
                unsure.append(number)
        if unsure:
            self._check_written(messages, tools, unsure)

    def _check_written(self, messages: list[Message], tools: list[Any] | None, numbers: Sequence[int]) -> None:
        """Put a mark in the place of each of these contents, and see that it is written."""
        contents = "".join(message["content"] for message in messages)
        mark = next(mark for n in itertools.count() if (mark := f"mark{n}x") not in contents)
        marked = list(messages)
        for number in numbers:
            marked[number] = {**messages[number], "content": f"{mark}{number}x"}
        text = self.render(marked, tools)
        for number in numbers:
            if marked[number]["content"] not in text:
                raise BadRow(f"the chat template leaves out message {number} (of the {messages[number]['role']})")

    def check_fields(self, messages: list[Message], tools: list[Any] | None, fields: Fields) -> None:
        """Every field of a message is read by the template, harmless, or to be ignored."""
        for number, message in enumerate(messages):
            if len(message) == 2:
                continue
            for name in sorted(message.keys() - PLAIN - HARMLESS_IN_MESSAGE):
                if fields.ignores(name) or self._reads(name, number, messages, tools):
                    continue
                of = f" of message {number} ({message['role']}): the chat template does not use it"
                raise BadRow(fields.unread([name], of))

    def _reads(self, name: str, number: int, messages: list[Message], tools: list[Any] | None) -> bool:
        looked_at = self.facts.fields
        if looked_at is None:
            return True
        if name in REASONING:  # of which transformers makes one; templates leave out that of earlier turns
            return not looked_at.isdisjoint(REASONING)
        role = messages[number]["role"]
        if name == "tool_calls" and role == "assistant":
            return name in looked_at  # and the names of what is called are looked for
        if (role, name) == ("tool", "name"):
            return True  # whose result it is, the call before it says
        if name not in looked_at:
            return False
        without = {other: value for other, value in messages[number].items() if other != name}
        changed = [*messages[:number], without, *messages[number + 1 :]]
        try:
            return self.render(changed, tools) != self.render(messages, tools)
        except BadRow:
            return True


def read_messages(value: Any, field: str, system: Any, conventions: Conventions, fields: Fields) -> list[Message]:
    """Messages as the template shall see them, with a `loss` in each: its weight, 0 if it is not learnt."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{field}` is not a list of messages, or empty")
    messages = [read_message(message, number, conventions, fields) for number, message in enumerate(value)]
    return messages if system is None else with_system(messages, system)


def read_message(said: Any, number: int, conventions: Conventions, fields: Fields) -> Message:
    if not isinstance(said, dict):
        raise BadRow(f"message {number} is not an object with a `role`")
    if len(said) == 2 and (role := said.get("role")) in LEARNT and isinstance(said.get("content"), str):
        return {"role": role, "content": said["content"], "loss": float(LEARNT[role])}  # as nearly all are
    # columnar files give every message every key; what is None was not there
    message: Message = {name: item for name, item in said.items() if item is not None and name not in fields.names}
    if "from" in message:
        if both := sorted(message.keys() & {"role", "content"}):
            raise BadRow(f"message {number} has `from`, and `{both[0]}` too: only one way of writing is read")
        message["role"] = message.pop("from")
        if "value" in message:
            message["content"] = message.pop("value")
    speaker = message.get("role")
    if not isinstance(speaker, str):
        raise BadRow(f"message {number} is not an object with a `role`; it has {', '.join(map(repr, message))}")
    if speaker in CALLS and not conventions.knows(speaker):
        message |= {"role": "assistant", "content": "", "tool_calls": read_calls(message.get("content"), number)}
    elif speaker not in ROLES:
        message["role"] = conventions.role_of(speaker)
        if not conventions.knows(message["role"]):
            raise BadRow(f"`role` of message {number} is {speaker!r}, which the chat template does not know either")
    if "tool_calls" in message:
        message.setdefault("content", "")
        if calls := read_list(message["tool_calls"], f"`tool_calls` of message {number}"):
            message["tool_calls"] = [with_arguments(call, conventions, number) for call in calls]
        else:
            del message["tool_calls"]
    message["loss"] = loss_weight(message, number)
    for name in [name for name, item in message.items() if name not in PLAIN and says_nothing(item)]:
        del message[name]
    return message


def loss_weight(message: Message, number: int) -> float:
    """By `loss`, or what other tools call so (`train`): 1 or 0; or by a `weight`. Without any, answers are learnt."""
    role, flags, weight = message["role"], [], 1.0
    for name in ("loss", "train"):
        if name in message:
            flag = message.pop(name)
            if not isinstance(flag, bool):
                raise BadRow(f"`{name}` of message {number} is {flag!r}, not true or false")
            flags.append(flag)
    if "weight" in message:
        weight = read_weight(message.pop("weight"), f"`weight` of message {number}")
        if weight and role != "assistant" and True not in flags:
            raise BadRow(
                f"`weight` of message {number} ({role}) is {weight:g}: write `loss: true` if it shall be learnt"
            )
        flags.append(weight > 0)
    if len(set(flags)) > 1:
        raise BadRow(f"`loss`, `train` and `weight` of message {number} contradict each other")
    return weight if (flags[0] if flags else role == "assistant") else 0.0


def read_weight(value: Any, what: str) -> float:
    """What the loss on a message or a row is multiplied by."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_WEIGHT:
        raise BadRow(f"{what} is {str(value)[:80]!r}; expected what its loss is multiplied by: 0 to {MOST_WEIGHT:g}")
    return float(value)


def with_system(messages: list[Message], system: Any) -> list[Message]:
    if not isinstance(system, str):
        raise BadRow(f"`system` is {type(system).__name__}, not a string")
    own = [message["content"] for message in messages if message["role"] == "system"]
    if own and own != [system]:
        raise BadRow(
            "it has a `system` field, and another system message; name the field in data.ignore to leave it out"
        )
    return messages if own else [{"role": "system", "content": system, "loss": 0.0}, *messages]


def read_calls(value: Any, number: int) -> list[Any]:
    """What a speaker called function_call says: one call, or a list of them."""
    calls = parse(value, f"message {number} (function_call)")
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"message {number} (function_call) is not a call with `name` and `arguments`")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def with_arguments(call: Any, conventions: Conventions, number: int) -> Message:
    """The call with its arguments in the form that the template writes as they are meant."""
    if not isinstance(call, dict):
        raise BadRow(f"`tool_calls` of message {number} holds {type(call).__name__}, not objects")
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": with_arguments(inner, conventions, number)}
    if "arguments" not in call:
        return call
    what = f"`arguments` of a call in message {number}"
    arguments = parse(call["arguments"], what) if isinstance(call["arguments"], str) else call["arguments"]
    if not isinstance(arguments, dict):
        raise BadRow(f"{what} are {type(arguments).__name__}, not an object")
    return {**call, "arguments": arguments if conventions.takes_objects else json.dumps(arguments, ensure_ascii=False)}


def read_list(value: Any, what: str) -> list[Any]:
    """A list of objects, any of it given as JSON text."""
    if isinstance(value, str):
        value = parse(value, what) if value.strip() else []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(f"{what} is {type(value).__name__}, not a list")
    objects = [parse(item, what) if isinstance(item, str) else item for item in value]
    for item in objects:
        if not isinstance(item, dict):
            raise BadRow(f"{what} holds {type(item).__name__}, not objects")
    return objects


def parse(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{what} is str, not valid JSON ({str(error)[:200]})") from None


def check_names(functions: Sequence[Any], text: str, what: str) -> None:
    """Tools and calls have names, which must be somewhere in what the template writes."""
    for function in functions:
        inner = function.get("function") if isinstance(function.get("function"), dict) else function
        name = inner.get("name")
        if isinstance(name, str) and name not in text:
            raise BadRow(f"the chat template leaves out {name!r} of {what}")
