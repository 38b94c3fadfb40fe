"""Find out which conventions a chat template follows, and check that it does not drop any content of a row."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.marked_messages import unused_mark
from omnizoo.data.rendering.template_analysis import read_template
from omnizoo.data.rendering.template_sandbox import REASONING
from omnizoo.data.row import BadRow
from omnizoo.data.rows.messages import PLAIN, ROLES, SPEAKERS, Message, check_names
from omnizoo.data.rows.unused_fields import MESSAGE_METADATA_FIELDS, RowFields

# Why a field with reasoning is not used, and what to do.
NO_REASONING = (
    "the chat template does not read it. Set data.thinking_tags to write it into the content, or data.thinking: drop."
)
# A template may remove the beginning of a response (its reasoning). A long content therefore counts as rendered if its
# last TAIL characters are in the text.
TAIL = 64


class Conventions:
    """The conventions of one chat template.

    They are found by analyzing the template and by rendering short test conversations. They do not depend on the rows
    that were rendered before.

    Args:
        source: The Jinja source of the template.
        special_tokens: Special tokens of the tokenizer by name, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        self.source = source
        self.special_tokens = special_tokens
        self.facts = read_template(source)
        self._renders_role: dict[str, bool] = {}  # cache of `renders_role`, by role

    def render(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return the text of a conversation."""
        return ChatTemplate(self.source, tools, self.special_tokens).render(messages)

    def knows(self, role: str) -> bool:
        """Whether a role is one of the standard roles, or a word in the code of the template."""
        return role in ROLES or role in self.facts.words

    def role_of(self, speaker: str) -> str:
        """Return the role of a speaker, such as "user" for "human".

        A word for tools, such as "observation", is kept if it occurs in the template and "tool" does not.
        """
        role = SPEAKERS.get(speaker, speaker)
        words = self.facts.words
        if role == "tool" and speaker in words and "tool" not in words:
            return speaker
        return role

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template expects tool call arguments as objects. Others expect them as JSON text (OpenAI API)."""
        text = self._call({"a1x": "b"})
        is_shown = "a1x" in text and "{'a1x'" not in text  # {'a1x' means that the template printed a Python dict
        return is_shown or "a1x" not in self._call('{"a1x": "b"}')

    def _call(self, arguments: Any) -> str:
        """Render a tool call with the given arguments. Return "" if the template raises an error."""
        function = {"name": "f", "arguments": arguments}
        # Some templates read the keys of `function` from the call itself, so they are set there as well.
        call = {"id": "call00000", "type": "function", "function": function, **function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._try([{"role": "user", "content": "a"}, turn])

    def _try(self, messages: list[Message]) -> str:
        """Render a conversation without tools. Return "" if the template raises an error."""
        try:
            return self.render(messages, None)
        except BadRow:
            return ""

    def renders_role(self, role: str) -> bool:
        """Whether the template renders the content of messages with this role, tested on a short conversation."""
        if role not in self._renders_role:
            user: Message = {"role": "user", "content": "a"}
            assistant: Message = {"role": "assistant", "content": "b"}
            marked: Message = {"role": role, "content": "mark0x"}
            conversations = {
                "user": [marked, assistant],
                "assistant": [user, marked],
                "system": [marked, user, assistant],
            }
            conversation = conversations.get(role, [user, assistant, marked])
            self._renders_role[role] = "mark0x" in self._try(conversation)
        return self._renders_role[role]

    def check_tools(self, tools: list[Any] | None) -> None:
        """Check that the template reads the tools of a row. Raises `BadRow` if it does not."""
        if tools and "tools" not in self.facts.variables:
            raise BadRow(
                "the chat template drops `tools`. Use a template that writes them, or add `tools` to data.ignore."
            )

    def check(self, messages: list[Message], tools: list[Any] | None, text: str) -> None:
        """Check that the rendered text contains all messages, tools and tool calls.

        Args:
            messages: The messages, with contents as text.
            tools: The tools of the row; None if there are none.
            text: The rendered conversation.

        Raises:
            BadRow: If the template drops a message, a tool or a tool call.
        """
        if tools:
            check_names(tools, text, "`tools`")
        stop = 0
        not_found = []
        for number, message in enumerate(messages):
            if "tool_calls" in message:
                check_names(message["tool_calls"], text, f"the calls of message {number}")
            content = message["content"].strip()
            if not content:
                continue
            content_stop = _find_stop(text, content, stop) if self.renders_role(message["role"]) else None
            if content_stop is None:
                not_found.append(number)
            else:
                stop = content_stop
        if not_found:
            self._check_rendered(messages, tools, not_found)

    def _check_rendered(self, messages: list[Message], tools: list[Any] | None, numbers: Sequence[int]) -> None:
        """Check that the template writes the contents of some messages.

        Their contents are replaced with words that occur nowhere else. The rendered text must contain these words.

        Args:
            messages: All messages.
            tools: The tools of the row; None if there are none.
            numbers: Indices of the messages to check.

        Raises:
            BadRow: If the template drops one of these messages.
        """
        contents = "".join(message["content"] for message in messages)
        mark = unused_mark(contents)
        marked = list(messages)
        for number in numbers:
            marked[number] = {**messages[number], "content": f"{mark}{number}x"}
        text = self.render(marked, tools)
        for number in numbers:
            if marked[number]["content"] not in text:
                raise BadRow(f"the chat template drops message {number} ({messages[number]['role']})")

    def check_fields(self, messages: list[Message], tools: list[Any] | None, fields: RowFields) -> None:
        """Check that the template uses all fields of the messages, except metadata and ignored fields.

        Args:
            messages: The messages, with contents as text.
            tools: The tools of the row; None if there are none.
            fields: Determines which fields are ignored.

        Raises:
            BadRow: If the template does not use a field.
        """
        for number, message in enumerate(messages):
            for name in sorted(message.keys() - PLAIN - MESSAGE_METADATA_FIELDS):
                if fields.is_ignored(name) or self._reads(name, number, messages, tools):
                    continue
                location = f"message {number} ({message['role']})"
                if name in REASONING and message["role"] == "assistant":
                    raise BadRow(f"`{name}` of {location} is not used: {NO_REASONING}")
                raise BadRow(fields.unused_message([name], location, "the chat template does not read it"))

    def _reads(self, name: str, number: int, messages: list[Message], tools: list[Any] | None) -> bool:
        """Whether the template uses the field `name` of message `number`."""
        fields_read = self.facts.fields
        if fields_read is None:  # the template may read any field
            return True
        if name in REASONING:  # the names are synonyms; `thinking.py` checks each message
            return not fields_read.isdisjoint(REASONING)
        role = messages[number]["role"]
        if name == "tool_calls" and role == "assistant":
            return name in fields_read  # `check` also searches the text for the names of the calls
        if (role, name) == ("tool", "name"):
            return True  # a tool result need not repeat the name, because the preceding call contains it
        if name not in fields_read:
            return False
        without_field = {other: value for other, value in messages[number].items() if other != name}
        changed = [*messages[:number], without_field, *messages[number + 1 :]]
        try:
            return self.render(changed, tools) != self.render(messages, tools)
        except BadRow:
            return True


def _find_stop(text: str, content: str, start: int) -> int | None:
    """Search for `content` in `text` from index `start`, and return the index after it.

    For a long content, finding its last `TAIL` characters is enough. Return None if the content is not found.
    """
    index = text.find(content, start)
    if index >= 0:
        return index + len(content)
    if len(content) > TAIL:
        index = text.find(content[-TAIL:], start)
        if index >= 0:
            return index + TAIL
    return None
