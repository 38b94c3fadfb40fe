"""Messages as other tools write them become messages as chat templates take them, and nothing in them gets lost.

Who speaks, tools and their calls, and on what the loss is are brought into one form. What a template leaves out (a
message, a field of one, the tools) is asked of the template itself, by rendering it, once for each kind of message.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omnizoo.data.fields import HARMLESS_IN_MESSAGE, Fields, says_nothing
from omnizoo.data.sources import BadRow

Message = dict[str, Any]
Render = Callable[[list[Message], list[Any] | None], str]  # of a conversation with tools

ROLES = ("system", "user", "assistant", "tool")
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
QUOTED = re.compile(r"""'([^'"\s]+)'|"([^'"\s]+)\"""")
TAIL = 64  # characters: a template may cut off what an answer begins with (its thinking), not how it ends
PLAIN = {"role", "content", "loss"}


class Conventions:
    """What one chat template does with messages, found out as they come."""

    def __init__(self, source: str, render: Render) -> None:
        self.render = render
        self.words = {word for pair in QUOTED.findall(source) for word in pair if word}
        self.read: set[tuple[str, str]] = set()  # (role, field) that it was seen to read
        self.written: set[str] = set()  # roles whose content it was seen to write
        self.writes_tools = False
        self._takes_objects: bool | None = None

    def knows(self, role: str) -> bool:
        return role in ROLES or role in self.words

    def role_of(self, speaker: str) -> str:
        role = SPEAKERS.get(speaker, speaker)
        return speaker if role == "tool" and speaker in self.words and "tool" not in self.words else role

    @property
    def takes_objects(self) -> bool:
        """Arguments of calls are objects to most templates; some want them as JSON text, as the OpenAI API has them."""
        if self._takes_objects is None:
            self._takes_objects = '"a1x"' in self._call({"a1x": "b"}) or "a1x" not in self._call('{"a1x": "b"}')
        return self._takes_objects

    def _call(self, arguments: Any) -> str:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function, **function}  # some know no `function`
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self.render([{"role": "user", "content": "a"}, turn], None)
        except BadRow:
            return ""

    def check(self, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        """`text` is all that is left of the messages; whatever is not in it is a bad row."""
        if tools:
            self._check_tools(messages, tools, text)
        if any(message["role"] not in self.written for message in messages):
            self._check_roles(messages, tools)
        at = 0
        for number, message in enumerate(messages):
            if "tool_calls" in message:
                check_names(message["tool_calls"], text, f"the calls of message {number}")
            if not (content := message["content"].strip()):
                continue
            if (found := text.find(content, at)) >= 0:
                at = found + len(content)
            elif len(content) > TAIL and (found := text.find(content[-TAIL:], at)) >= 0:
                at = found + TAIL
            else:
                self._check_roles(messages, tools, number)

    def _check_roles(self, messages: list[Message], tools: list[Any] | None, number: int | None = None) -> None:
        """Put a mark in the place of every content, or of one, and see that each is written."""
        mark = next(
            f"mark{n}x" for n in itertools.count() if not any(f"mark{n}x" in message["content"] for message in messages)
        )
        marked = [
            {**message, "content": f"{mark}{i}x"} if message["content"] and number in (None, i) else message
            for i, message in enumerate(messages)
        ]
        text = self.render(marked, tools)
        for i, message in enumerate(marked):
            if message is not messages[i] and message["content"] not in text:
                raise BadRow(f"the chat template leaves out message {i} (of the {message['role']})")
        self.written |= {message["role"] for message in messages if message["content"]}

    def _check_tools(self, messages: list[Message], tools: list[Any], text: str) -> None:
        if not self.writes_tools:
            try:
                without = self.render(messages, None)
            except BadRow:  # it needs tools
                without = ""
            if without == text:
                raise BadRow("the chat template leaves out its `tools`")
        self.writes_tools = True
        check_names(tools, text, "its `tools`")

    def check_fields(self, messages: list[Message], tools: list[Any] | None, fields: Fields) -> None:
        """Every field of a message is read by the template, harmless, or to be ignored."""
        unsure = {
            (number, name)
            for number, message in enumerate(messages)
            if len(message) > 2
            for name in message.keys() - PLAIN - HARMLESS_IN_MESSAGE
            if (message["role"], name) not in self.read
        }
        if not unsure:
            return
        watched = [Watched(message) for message in messages]
        self.render([*watched], tools)
        self.read |= {(message["role"], name) for message in watched for name in message.seen}
        for number, name in sorted(unsure):
            role = messages[number]["role"]
            # the result of a tool is said whose it is by the call before it
            is_known = (role, name) in self.read or (role, name) == ("tool", "name")
            if not is_known and not fields.ignores(name):
                raise BadRow(fields.unread([name], f" of message {number} ({role}): the chat template does not use it"))


class Watched(dict[str, Any]):
    """A message that knows which of its fields were looked at."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.seen.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.seen.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        self.seen.update(super().keys())
        return super().items()

    def values(self) -> Any:
        self.seen.update(super().keys())
        return super().values()


def read_messages(value: Any, field: str, system: Any, conventions: Conventions, fields: Fields) -> list[Message]:
    """Messages as the template shall see them, with a `loss` (is it learnt?) in each."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{field}` is not a list of messages, or empty")
    messages = [read_message(message, number, conventions, fields) for number, message in enumerate(value)]
    return messages if system is None else with_system(messages, system)


def read_message(said: Any, number: int, conventions: Conventions, fields: Fields) -> Message:
    if not isinstance(said, dict):
        raise BadRow(f"message {number} is not an object with a `role`")
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
    message["loss"] = is_learnt(message, number)
    for name in [name for name, item in message.items() if name not in PLAIN and says_nothing(item)]:
        del message[name]
    return message


def is_learnt(message: Message, number: int) -> bool:
    """`loss`, or what other tools call so: `train`, and a `weight` of 0 or 1."""
    role, flags = message["role"], []
    for name in ("loss", "train"):
        if name in message:
            flag = message.pop(name)
            if not isinstance(flag, bool):
                raise BadRow(f"`{name}` of message {number} is {flag!r}, not true or false")
            flags.append(flag)
    if "weight" in message:
        weight = message.pop("weight")
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadRow(
                f"`weight` of message {number} is {weight!r}; of weights of the loss, only 0 and 1 are supported yet"
            )
        if weight == 1 and role != "assistant" and True not in flags:
            raise BadRow(f"`weight` of message {number} ({role}) is 1: write `loss: true` if it shall be learnt")
        flags.append(weight == 1)
    if len(set(flags)) > 1:
        raise BadRow(f"`loss`, `train` and `weight` of message {number} contradict each other")
    return flags[0] if flags else role == "assistant"


def with_system(messages: list[Message], system: Any) -> list[Message]:
    if not isinstance(system, str):
        raise BadRow(f"`system` is {type(system).__name__}, not a string")
    own = [message["content"] for message in messages if message["role"] == "system"]
    if own and own != [system]:
        raise BadRow(
            "it has a `system` field, and another system message; name the field in data.ignore to leave it out"
        )
    return messages if own else [{"role": "system", "content": system, "loss": False}, *messages]


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
