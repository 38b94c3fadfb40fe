"""Conversations of models that have speakers and generate no text (`SpeakerFormat`).

A turn is rendered as the processor of the model family does it: the text, followed by the media item that speaks the
text. Items are targets unless the message turns its loss off. Text is never a target.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.row import BadRow, Row
from omnizoo.data.rows.media import RowMedia
from omnizoo.data.rows.messages import loss_weight
from omnizoo.models.media.media_model import SpeakerFormat


def write_turns(
    row: Row, field: str, turns: SpeakerFormat, media: RowMedia, special: Mapping[str, Any], asks: bool = False
) -> str:
    """Return the conversation of a row as one text, and collect its items in `media`.

    Args:
        row: The row.
        field: The field that contains the messages.
        turns: The format of turns.
        media: Collects the items.
        special: Special tokens of the tokenizer by name, such as `bos_token`.
        asks: Whether the text is a prompt. The item of the last message is then left out, because the model is to
            generate it.

    Raises:
        BadRow: If the messages do not have this format.
    """
    messages = row[field]
    if field == "text" or not isinstance(messages, list) or not messages:
        raise BadRow(f"`{field}` is no list of messages, each with a `role` ({turns.expected}) and a `content`")
    if unread := [name for name in ("system", "tools") if name in row]:
        raise BadRow(f"its `{unread[0]}` has no place in what speakers say to each other; name it in data.ignore")
    written = ""
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        role = _role(message, number, turns)
        text, item = _said(message, number, media, is_last, asks)
        written += _mark(turns.before, role, special) + text + _mark(turns.after, role, special) + item
    if not asks:  # the item of an omitted response stays in its column
        media.check_counts()
    return written


def _mark(pattern: str, role: str, special: Mapping[str, Any]) -> str:
    """Return the text before or after a turn, with the role and special tokens filled in."""
    try:
        return pattern.format(role=role, **special)
    except KeyError as missing:
        raise UserError(f"model.tokenizer: it has no {missing.args[0]}, which turns are written with") from None


def _role(message: Any, number: int, turns: SpeakerFormat) -> str:
    """Return the role of a message. Raises `BadRow` if it does not match the format."""
    if not isinstance(message, dict) or "role" not in message:
        raise BadRow(f"message {number} is not an object with a `role` ({turns.expected}) and a `content`")
    role = message["role"]
    if isinstance(role, bool) or not isinstance(role, str | int) or not re.fullmatch(turns.role, str(role)):
        raise BadRow(f"`role` of message {number} is {role!r}; expected {turns.expected}")
    return str(role)


def _said(message: dict[str, Any], number: int, media: RowMedia, is_last: bool, asks: bool) -> tuple[str, str]:
    """Return the text of a message, and the text of its item, which is "" without an item."""
    what = f"`content` of message {number}"
    message = {name: value for name, value in message.items() if value is not None}
    read = {"role", "content", "tool_call_id", "loss", "train"}
    media.notation.fields.check_read(message, read, f" of message {number}")
    is_trained = loss_weight(message | {"role": "assistant"}, number) > 0
    parts = _parts(message.get("content"), media, what)
    media.begin(str(message["role"]))
    texts = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    others = [part for part in parts if part not in texts]
    if len(texts) != 1:
        raise BadRow(f"message {number} has {len(texts)} texts; expected one, which says what is to be said")
    if len(others) > 1:
        raise BadRow(f"message {number} has {len(others)} items besides its text; expected one, which says it")
    if not others and not is_last:
        known = " or ".join(media.notation.modalities)
        raise BadRow(f"message {number} has no {known} that says its text; only the last one may go without")
    text = media.part(texts[0], False, what)
    if not text.strip():
        raise BadRow(f"message {number} has an empty text; expected what is to be said")
    if not others or (asks and is_last):
        return text, ""
    return text, media.part(others[0], is_trained, what)


def _parts(content: Any, media: RowMedia, what: str) -> Sequence[Any]:
    """Return the content of a message as parts. In a string, a tag stands for the next item of its column."""
    if isinstance(content, str):
        pieces = media.notation.tag.split(content)  # odd indices are the names of tags
        tags = [{"type": name} for name in pieces[1::2]]
        return [{"type": "text", "text": " ".join(piece.strip() for piece in pieces[::2]).strip()}, *tags]
    if not isinstance(content, list):
        raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
    return content
