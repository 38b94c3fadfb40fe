"""Conversations of models that have speakers and write no text (`Turns`): what is said, and the item that says it.

A turn is written as the family's own processor writes it: its text, then what says that text. All of these are learnt
unless the message says otherwise; text never is.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.data.row_fields import HARMLESS_IN_MESSAGE
from omnizoo.data.row_media import RowMedia
from omnizoo.data.rows import BadRow, Row
from omnizoo.models.media_model import Turns

FLAGS = ("loss", "train")


def write_turns(
    row: Row, field: str, turns: Turns, media: RowMedia, special: Mapping[str, Any], asks: bool = False
) -> str:
    """The conversation in `field` of a row as one text; its items are collected in `media`. `asks`: the model is to
    say the last text, and so is not shown what says it."""
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
    if not asks:  # of an answer that is not shown, the item stays in its column
        media.check_counts()
    return written


def _mark(pattern: str, role: str, special: Mapping[str, Any]) -> str:
    try:
        return pattern.format(role=role, **special)
    except KeyError as missing:
        raise UserError(f"model.tokenizer: it has no {missing.args[0]}, which turns are written with") from None


def _role(message: Any, number: int, turns: Turns) -> str:
    if not isinstance(message, dict) or "role" not in message:
        raise BadRow(f"message {number} is not an object with a `role` ({turns.expected}) and a `content`")
    role = message["role"]
    if isinstance(role, bool) or not isinstance(role, str | int) or not re.fullmatch(turns.role, str(role)):
        raise BadRow(f"`role` of message {number} is {role!r}; expected {turns.expected}")
    return str(role)


def _said(message: dict[str, Any], number: int, media: RowMedia, is_last: bool, asks: bool) -> tuple[str, str]:
    """The text of a message, and its item; an empty one if it has none."""
    what, fields = f"`content` of message {number}", media.notation.fields
    flags = {message[name] for name in FLAGS if message.get(name) is not None}
    if len(flags) > 1 or not flags <= {True, False}:
        raise BadRow(f"`loss` of message {number} is {', '.join(map(repr, flags))}; expected true or false")
    read = {"role", "content", *FLAGS, *HARMLESS_IN_MESSAGE}
    unread = [name for name in message if name not in read and message[name] is not None and not fields.ignores(name)]
    if unread:
        raise BadRow(fields.unread(unread, f" of message {number}"))
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
    return text, media.part(others[0], flags != {False}, what)


def _parts(content: Any, media: RowMedia, what: str) -> Sequence[Any]:
    """A string is text, in which a tag stands for the next item of its column."""
    if isinstance(content, str):
        pieces = media.notation.tag.split(content)  # every other one is the name in a tag
        tags = [{"type": name} for name in pieces[1::2]]
        return [{"type": "text", "text": " ".join(piece.strip() for piece in pieces[::2]).strip()}, *tags]
    if not isinstance(content, list):
        raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
    return content
