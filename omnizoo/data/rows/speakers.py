"""Write conversations for speech models that have speakers and generate no text (see `SpeakerFormat`).

A turn consists of a text and the media item in which the text is spoken. It is written in the same way as by the
processor of the model family. Items are targets unless the message turns off its loss. Text is never a target.
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
    row: Row,
    field: str,
    turns: SpeakerFormat,
    media: RowMedia,
    special_tokens: Mapping[str, Any],
    is_prompt: bool = False,
) -> str:
    """Return the conversation of a row as one text, and collect its media items.

    Args:
        row: The row.
        field: The field that contains the messages.
        turns: The format of turns.
        media: Collects the items.
        special_tokens: Special tokens of the tokenizer by name, such as `bos_token`.
        is_prompt: Whether the text is a prompt. The item of the last message is then omitted, because the model will
            generate it.

    Raises:
        BadRow: If the messages do not have this format.
    """
    messages = row[field]
    if field == "text" or not isinstance(messages, list) or not messages:
        raise BadRow(f"`{field}` is not a list of messages, each with a `role` ({turns.expected}) and a `content`")
    for name in ("system", "tools"):
        if name in row:
            raise BadRow(f"`{name}` is not supported in speaker conversations. Add it to data.ignore to drop it.")

    turn_texts = []
    for number, message in enumerate(messages):
        is_last = number == len(messages) - 1
        role = _role(message, number, turns)
        text, item = _text_and_item(message, number, media, is_last, is_prompt)
        before = _marker(turns.before, role, special_tokens)
        after = _marker(turns.after, role, special_tokens)
        turn_texts.append(before + text + after + item)
    if not is_prompt:  # in a prompt, the item of the last message is not used, so the counts may differ
        media.check_counts()
    return "".join(turn_texts)


def _marker(pattern: str, role: str, special_tokens: Mapping[str, Any]) -> str:
    """Return the text before or after a turn, with the role and special tokens filled in."""
    try:
        return pattern.format(role=role, **special_tokens)
    except KeyError as missing:
        raise UserError(
            f"model.tokenizer: the special token {missing.args[0]}, which separates turns, is missing. Add it to the "
            "tokenizer."
        ) from None


def _role(message: Any, number: int, turns: SpeakerFormat) -> str:
    """Return the role of a message. Raises `BadRow` if the model does not support it."""
    if not isinstance(message, dict) or "role" not in message:
        raise BadRow(f"message {number} is not an object with a `role` ({turns.expected}) and a `content`")
    role = message["role"]
    if isinstance(role, bool) or not isinstance(role, str | int) or not re.fullmatch(turns.role, str(role)):
        raise BadRow(f"`role` of message {number} is {role!r}; expected {turns.expected}")
    return str(role)


def _text_and_item(
    message: dict[str, Any], number: int, media: RowMedia, is_last: bool, is_prompt: bool
) -> tuple[str, str]:
    """Return the text of a message, and the text that represents its media item; "" if there is no item.

    Args:
        message: The message.
        number: Index of the message, for error messages.
        media: Collects the item.
        is_last: Whether it is the last message. Only the last message may lack an item.
        is_prompt: Whether the conversation is a prompt. The item of the last message is then ignored.

    Raises:
        BadRow: If the message does not consist of one text and one item.
    """
    what = f"`content` of message {number}"
    message = {name: value for name, value in message.items() if value is not None}
    used = {"role", "content", "tool_call_id", "loss", "train"}
    media.notation.fields.check_used(message, used, f"message {number}")
    is_trained = loss_weight(message | {"role": "assistant"}, number) > 0
    parts = _parts(message.get("content"), media, what)
    media.begin(str(message["role"]))

    texts = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    items = [part for part in parts if part not in texts]
    if len(texts) != 1:
        raise BadRow(f"message {number} has {len(texts)} texts; expected one, the transcript of its media item")
    if len(items) > 1:
        raise BadRow(f"message {number} has {len(items)} media items; expected one, in which its text is spoken")
    if not items and not is_last:
        modalities = " or ".join(media.notation.modalities)
        raise BadRow(f"message {number} has no {modalities} item; only the last message may lack it")

    text = media.part(texts[0], False, what)
    if not text.strip():
        raise BadRow(f"message {number} has an empty text; expected the text to speak")
    if not items or (is_prompt and is_last):
        return text, ""
    return text, media.part(items[0], is_trained, what)


def _parts(content: Any, media: RowMedia, what: str) -> Sequence[Any]:
    """Return the content of a message as a list of parts. In a string, each tag becomes a part without a value."""
    if isinstance(content, str):
        pieces = media.notation.tag.split(content)  # texts at even indices, names of tags at odd indices
        text = " ".join(piece.strip() for piece in pieces[::2]).strip()
        tags = [{"type": name} for name in pieces[1::2]]
        return [{"type": "text", "text": text}, *tags]
    if not isinstance(content, list):
        raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
    return content
