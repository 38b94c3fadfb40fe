"""Types, field names and checks for rows. All sources and row formats use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SIDES = ("chosen", "rejected")  # fields with the responses of a preference pair
SINGLE = ("completion", "label")  # fields of a labeled response: the text, and whether it is desirable
PROMPTS = ("prompt", "messages", "conversations")  # fields that may contain the prompt of a preference row
CHAT_PROMPTS = ("instruction", "input", "query", "history")  # fields with parts of a prompt; chats are built from them
RESPONSES = ("completion", "output", "response")  # fields that may contain a labeled response
# Names of preference fields in the rows of other tools, and the names that OmniZoo uses.
PREFERENCE_ALIASES = {"chosen_messages": "chosen", "rejected_messages": "rejected", "kto_tag": "label"}
# Fields that may contain the text or chat of a row, in order of preference.
CONVERSATION = ("messages", "conversations", "text", "input_ids")
# Fields whose value may be a list of objects.
STRUCTS = (
    *("messages", "conversations", "tools", "prompt", "chosen", "rejected", "completion"),
    *("chosen_messages", "rejected_messages"),
)


@dataclass(frozen=True)
class SourceSchema:
    """Settings for the rows of one source."""

    key: str = "data.sources.N"  # config key of the source, for error messages
    format: str | None = None  # `format` of the source; None to infer it from the fields
    json_columns: Sequence[str] | None = None  # `json_columns` of the source; None for the default fields
    untagged_media: str | None = None  # where to put media without a tag in the texts; None if such rows are bad


DEFAULT_SCHEMA = SourceSchema()


@dataclass(frozen=True)
class Fix:
    """A change of the config that makes a bad row usable. `omnizoo new` writes it to the config."""

    key: str  # config key, such as `data.sources.0.columns`
    value: Any  # new value of the key; items to append if the key is a list; None if only the user knows the value
    reason: str  # comment to write next to the key
    file: str = ""  # missing media file that the row refers to; only set if the key is `media_dir`


class BadRow(Exception):  # noqa: N818 (not an error with `data.on_bad_row: skip`)
    """Raised for a row that cannot be used.

    The caller adds the location of the row (file and line) to the message. `data.on_bad_row` decides whether the run
    skips the row or stops.

    Args:
        message: Why the row cannot be used.
        fixes: Config changes that make the row usable, the best one first.

    Example::

        raise BadRow("`label` is missing")
    """

    def __init__(self, message: str = "", fixes: Sequence[Fix] = ()) -> None:
        super().__init__(message)
        self.fixes = tuple(fixes)


def stop_message(bad_row: str) -> str:
    """Return the error message of a run that stops at a bad row.

    Args:
        bad_row: The location of the row, and why it cannot be used.
    """
    return f"{bad_row.removesuffix('.')}. Set `data.on_bad_row: skip` to skip bad rows."


def check_characters(value: Any) -> None:
    """Check that no string in a nested value contains a lone surrogate.

    JSON can express lone surrogates, such as `\\ud800`. They cannot be encoded as UTF-8, so tokenizers and files reject
    them.

    Raises:
        BadRow: If a string contains a lone surrogate.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            surrogate = value[error.start].encode("unicode_escape").decode()
            raise BadRow(
                f"a string has a lone surrogate ({surrogate}) at character {error.start}. Fix the encoding of the row."
            ) from None
    elif isinstance(value, dict):
        for key, part in value.items():
            check_characters(key)
            check_characters(part)
    elif isinstance(value, list | tuple):
        for part in value:
            check_characters(part)


def without_nulls(row: Row, names: Sequence[str]) -> Row:
    """Remove the keys whose value is None from the objects in some fields of a row.

    A struct column of Arrow gives every object the union of all keys, with None for the missing ones. If they were
    kept, the calls of two different tools would each have the arguments of both.

    Args:
        row: The row.
        names: Fields whose value may be a list of objects.

    Returns:
        A copy of the row.
    """
    lists = [name for name in names if isinstance(row.get(name), list)]
    return row | {name: _without_nulls(row[name]) for name in lists}


def _without_nulls(value: Any) -> Any:
    """Return a copy of a nested value without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(part) for part in value]
    return value
