"""Types, field names and checks for rows, shared by all sources and row formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
SIDES = ("chosen", "rejected")  # the responses of a preference pair
SINGLE = ("completion", "label")  # a labeled response: the text, and whether it is desirable
PROMPTS = ("prompt", "messages", "conversations")  # fields that may contain the prompt of a preference row
CHAT_PROMPTS = ("instruction", "input", "query", "history")  # prompts as texts that the chat template formats
RESPONSES = ("completion", "output", "response")  # fields that may contain a labeled response
# Other names of the fields of preference rows.
PREFERENCE_ALIASES = {"chosen_messages": "chosen", "rejected_messages": "rejected", "kto_tag": "label"}
# Main content of a row; the first field present is used.
CONVERSATION = ("messages", "conversations", "text", "input_ids")
# Fields whose value is, or may be, a list of objects.
STRUCTS = (
    *("messages", "conversations", "tools", "prompt", "chosen", "rejected", "completion"),
    *("chosen_messages", "rejected_messages"),
)


@dataclass(frozen=True)
class SourceSchema:
    """Settings for the rows of one source."""

    key: str = "data.sources.N"  # config key of the source, for messages
    format: str | None = None
    json_columns: Sequence[str] | None = None
    untagged_media: str | None = None  # position of media for which no text has a tag; None if such rows are bad


DEFAULT_SCHEMA = SourceSchema()


@dataclass(frozen=True)
class Fix:
    """A config value with which a bad row can be used. `omnizoo new` writes it to the config."""

    key: str  # config key, such as `data.sources.0.columns`
    value: Any  # new value of the key; items to append if the key is a list; None if only the user can choose it
    reason: str  # comment for the config
    file: str = ""  # media file in the row that is missing; only for `media_dir`


class BadRow(Exception):  # noqa: N818 (not an error with `data.on_bad_row: skip`)
    """Raised for a row that cannot be used.

    The message is the reason. The caller adds the location of the row (file and line). `data.on_bad_row` sets whether
    the run skips the row or stops.

    Args:
        message: The reason.
        fixes: Config values with which the row can be used, the best one first.

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
    return f"{bad_row.removesuffix('.')}. Set data.on_bad_row: skip to skip bad rows."


def check_characters(value: Any) -> None:
    """Check that no string in a value contains a lone surrogate.

    JSON can express lone surrogates, but they cannot be encoded as UTF-8, so tokenizers and files reject them.

    Raises:
        BadRow: If a string, at any depth, contains a lone surrogate.
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
    """Return the row with None values removed from the objects in the fields `names`, which are lists of objects.

    Arrow struct columns give every object the union of all keys. If the None values were kept, two calls of different
    tools would each have the arguments of both.
    """
    lists = [name for name in names if isinstance(row.get(name), list)]
    return row | {name: _without_nulls(row[name]) for name in lists}


def _without_nulls(value: Any) -> Any:
    """Return the value without keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(part) for part in value]
    return value
