"""Detect the format of a row by a table of rules, and convert the row to `messages` or `text`.

A rule depends on the names and types of fields. The content of a text matters only for captions: a text with media
tags is no caption. If several rules match, the row is a bad row unless `data.sources.N.format` selects one.
Fields that a format does not use stay in the row, and raise an error if they are not used elsewhere
(`unused_fields.py`).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omnizoo.data.row import SIDES, BadRow, Row
from omnizoo.data.rows.media import read_column
from omnizoo.data.rows.messages import as_prompt, parse
from omnizoo.data.rows.unused_fields import HARMLESS, meaning

# Field names of a plain text, if the row has no other content.
DOCUMENT = (
    *("content", "body", "document", "article", "passage", "paragraph", "story", "page_content"),
    *("full_text", "plain_text", "raw_text", "raw_content", "code"),
)
# Ambiguous names of prompts and responses. They are not read, but error messages suggest how to rename them.
OTHER_PAIRS = (
    *(("question", "answer"), ("question", "response"), ("question", "output"), ("input", "output")),
    *(("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "response")),
    *(("instruction", "completion"), ("instruction", "answer"), ("query", "answer"), ("input", "response")),
    *(("input", "target"), ("inputs", "targets"), ("problem", "solution"), ("user", "assistant")),
)
LISTS = ("messages", "conversations", "history")  # never plain text: a string with a list or object is parsed as JSON
EITHER = ("prompt", "completion", *SIDES)  # fields that contain either a text or messages


@dataclass(frozen=True)
class SourceSchema:
    """Settings for the rows of one source. `where` is its config key, for messages."""

    where: str = "data.sources.N"
    format: str | None = None
    json_columns: Sequence[str] | None = None


@dataclass(frozen=True)
class SchemaInput:
    """The input of a rule: the fields of a row, and the modalities of the model."""

    given: Row  # fields that are not empty
    names: Collection[str]  # fields that are present, including empty ones
    read: Collection[str]  # modalities with an encoder
    produced: Collection[str]  # modalities with a decoder

    @property
    def media(self) -> dict[str, str]:
        """The media column of the row, by modality."""
        known = sorted({*self.read, *self.produced})
        return {name: column for name in known for column in (name, f"{name}s") if column in self.given}

    def has(self, *needed: str) -> str:
        """Return a reason if all of these columns are present and at least one is not empty, and else ""."""
        if all(name in self.names for name in needed) and any(name in self.given for name in needed):
            return "it has " + " and ".join(f"`{name}`" for name in needed)
        return ""


@dataclass(frozen=True)
class ParsedRow:
    """A row with a known format, converted to `messages`, `conversations` or `text`."""

    format: str  # name of the format
    why: str  # reason for the match
    row: Row  # the converted row, with its other fields
    prompt: str = ""  # beginning of `text` that is not trained on


@dataclass(frozen=True)
class Format:
    """One entry of the table of row formats."""

    name: str
    rule: str  # description of the required fields, for messages and docs
    takes: tuple[str, ...]  # fields that it uses
    fits: Callable[[SchemaInput], str]  # returns the reason for a match, or ""
    convert: Callable[[SchemaInput], tuple[Row, str]] = field(repr=False)  # returns the new row and its prompt


NOTHING_SAID = SourceSchema()


def parse_row(
    row: Row,
    given: Row,
    read: Collection[str] = (),
    produced: Collection[str] = (),
    shape: SourceSchema = NOTHING_SAID,
) -> ParsedRow | None:
    """Detect the format of a row, and convert the row.

    Args:
        row: The whole row.
        given: The fields of the row that are neither empty nor ignored.
        read: Modalities for which the model has an encoder.
        produced: Modalities for which the model has a decoder.
        shape: Settings of the source, which may select a format.

    Returns:
        The converted row, or None if no rule matches.

    Raises:
        BadRow: If several rules match, or the row does not match the selected format.
    """
    given = with_json(given, shape, {*read, *produced})
    offered = SchemaInput(given, {name for name in row if row[name] is not None} | given.keys(), read, produced)
    found = {format.name: why for format in FORMATS.values() if (why := format.fits(offered))}
    if shape.format is not None:
        return _asked_for(FORMATS[shape.format], found, offered, shape)
    # For `messages` with `text`, `check_conversation` raises an error that suggests data.ignore.
    if len(found) > 1 and not found.keys() <= {"messages", "text"}:
        listed = " or ".join(f"{name} ({why})" for name, why in found.items())
        raise BadRow(f"it can be read as {listed}; set {shape.where}.format to one of {', '.join(found)}")
    if not found:
        return None
    name, why = next(iter(found.items()))
    return ParsedRow(name, why, *FORMATS[name].convert(offered))


def _asked_for(format: Format, found: Mapping[str, str], offered: SchemaInput, shape: SourceSchema) -> ParsedRow:
    """Convert a row to the format that `data.sources.N.format` selects."""
    if format.name not in found and not (format.name == "text" and "text" in offered.given):
        has = ", ".join(f"`{name}`" for name in offered.given) or "nothing"
        raise BadRow(f"{shape.where}.format is {format.name}, which needs {format.rule}; this row has {has}")
    own = {*format.takes, *offered.media.values()}
    others = {name for other in found for name in FORMATS[other].takes} - own
    chosen = replace(offered, given=_rest(offered.given, *(others - {"system", "weight"})))
    return ParsedRow(format.name, f"{shape.where}.format says so", *format.convert(chosen))


def hint(given: Row, shape: SourceSchema) -> str:
    """Return a suggestion for a row that no rule matches, or ""."""
    for prompt, answer in OTHER_PAIRS:
        if prompt in given and answer in given:
            return f"{shape.where}.columns: {{query: {prompt}, response: {answer}}} reads them as a chat"
    texts = [name for name, value in given.items() if isinstance(value, str) and name not in HARMLESS]
    if len(texts) == 1 == len([name for name in given if name not in HARMLESS]) and meaning(texts[0]) is None:
        return f"{shape.where}.columns: {{text: {texts[0]}}} reads it as a text"
    return ""


# Fields that contain JSON text


def with_json(given: Row, shape: SourceSchema, media: Collection[str]) -> Row:
    """Parse the fields that contain JSON text: lists of messages, lists of media, and the `json_columns`."""
    asked, changed = shape.json_columns, {}
    for name, value in given.items():
        if not isinstance(value, str):
            continue
        if (asked is not None and name in asked) or (name in LISTS and value.lstrip()[:1] in ("[", "{")):
            changed[name] = parse(value, f"`{name}`")
        elif name in EITHER and asked is None and _holds_messages(value):
            raise BadRow(
                f"`{name}` is a text that holds messages as JSON; {shape.where}.json_columns: [{name}] reads them, "
                "json_columns: [] leaves it a text"
            )
        elif name.removesuffix("s") in media or name in media:
            parsed = _list_or_object(value)
            changed[name] = value if parsed is None else parsed
    return given | changed


def _holds_messages(text: str) -> bool:
    """Whether a text is JSON of messages."""
    value = _list_or_object(text)
    messages = value if isinstance(value, list) else [value]
    ways = ({"role", "content"}, {"from", "value"})
    return bool(messages) and all(isinstance(m, dict) and any(way <= m.keys() for way in ways) for m in messages)


def _list_or_object(text: str) -> Any:
    """Parse a JSON list or object. Return None for other text, such as a path that begins with a bracket."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# Conversion of each format to messages or a text


def _unchanged(offered: SchemaInput) -> tuple[Row, str]:
    """Return the row unchanged, for formats that need no conversion."""
    return offered.given, ""


def _text(given: Row, name: str) -> str:
    """Return a text field, "" if it is absent. Raises `BadRow` for other types."""
    value = given.get(name, "")
    if not isinstance(value, str):
        raise BadRow(f"`{name}` is {type(value).__name__}, not a text")
    return value


def _answer(given: Row, name: str) -> str:
    """Return a response field. Raises `BadRow` if it is empty."""
    if not (answer := _text(given, name)):
        raise BadRow(f"`{name}` is empty: there is no answer to learn")
    return answer


def _rest(given: Row, *taken: str) -> Row:
    """Return the row without the fields `taken`."""
    return {name: value for name, value in given.items() if name not in taken}


def _turns(prompt: str, answer: str) -> list[Row]:
    """Return a user message and an assistant message."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _history(given: Row) -> list[Row]:
    """Return the messages of earlier turns. `history` is a list of [prompt, response] pairs."""
    turns: list[Row] = []
    history = given.get("history", [])
    pairs = history if isinstance(history, list | tuple) else [history]
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(f"`history` is not a list of pairs of texts [prompt, answer]: see its entry {number}")
        turns += _turns(*pair)
    return turns


def _chat(given: Row, prompt: str, answer: str) -> list[Row]:
    """Return the messages of a conversation: its history, the prompt and the response."""
    if not prompt:
        raise BadRow("its prompt is empty")
    return [*_history(given), *_turns(prompt, answer)]


def _from_alpaca(offered: SchemaInput) -> tuple[Row, str]:
    given = offered.given
    prompt = "\n".join(part for part in (_text(given, "instruction"), _text(given, "input")) if part)
    chat = _chat(given, prompt, _answer(given, "output"))
    return _rest(given, "instruction", "input", "output", "history") | {"messages": chat}, ""


def _from_query(offered: SchemaInput) -> tuple[Row, str]:
    given = offered.given
    chat = _chat(given, _text(given, "query"), _answer(given, "response"))
    return _rest(given, "query", "response", "history") | {"messages": chat}, ""


def _from_prompt(offered: SchemaInput) -> tuple[Row, str]:
    """Join `prompt` and `completion` to one text or one conversation, in which only the completion is trained on."""
    given, rest = offered.given, _rest(offered.given, "prompt", "completion")
    prompt, completion = given.get("prompt", ""), given.get("completion", "")
    if isinstance(prompt, str) and isinstance(completion, str):
        return rest | {"text": prompt + _answer(given, "completion")}, prompt
    if not isinstance(prompt, list | dict) or not isinstance(completion, list | dict):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise BadRow(f"`prompt` and `completion` are {kinds}; expected two texts, or two lists of messages")
    before, answer = ([part] if isinstance(part, dict) else part for part in (prompt, completion))
    if not before or not answer or not all(isinstance(message, dict) for message in (*before, *answer)):
        raise BadRow("`prompt` and `completion` are not both lists of messages, or one is empty")
    return rest | {"messages": [*as_prompt(before), *answer]}, ""


def _captioned(offered: SchemaInput) -> str:
    """Return the caption field of a row with media, or "". A `text` without media tags is a caption."""
    given, media = offered.given, offered.media
    if not media or any(name in given for name in ("messages", "conversations")):
        return ""
    if isinstance(given.get("caption"), str):
        return "caption"
    text = given.get("text")
    return "text" if isinstance(text, str) and not any(f"<{name}>" in text for name in media) else ""


def _fits_caption(offered: SchemaInput, modalities: Collection[str]) -> str:
    """Return the reason for a match if the row has a caption, and all its media are of these modalities."""
    media, caption = offered.media, _captioned(offered)
    if not caption or not all(name in modalities for name in media):
        return ""
    columns = " and ".join(f"`{column}`" for column in media.values())
    return f"it has {columns}, and `{caption}` for a caption"


def _from_captioned(offered: SchemaInput, media_first: bool) -> tuple[Row, str]:
    """Return a row whose `text` is a list of parts: the media and the caption, in the given order."""
    given, caption, items = offered.given, _captioned(offered), []
    for name, column in offered.media.items():
        items += [{"type": name, name: item} for item in read_column({column: given[column]}, name) or []]
    text = [{"type": "text", "text": given[caption]}]
    parts = [*items, *text] if media_first else [*text, *items]
    return _rest(given, caption, *offered.media.values()) | {"text": parts}, ""


def _document(offered: SchemaInput) -> str:
    """Return the field of a plain text with a name of `DOCUMENT`, if it is the only content of the row, and else ""."""
    fields = [name for name in offered.given if name not in HARMLESS and name != "weight"]
    is_text = len(fields) == 1 and fields[0] in DOCUMENT and isinstance(offered.given[fields[0]], str)
    return fields[0] if is_text else ""


def _fits_conversation(offered: SchemaInput) -> str:
    name = next((name for name in ("messages", "conversations") if name in offered.given), "")
    return f"it has `{name}`" if name else ""


def _fits_document(offered: SchemaInput) -> str:
    name = _document(offered)
    return f"all it says is `{name}`, a text" if name else ""


def _from_document(offered: SchemaInput) -> tuple[Row, str]:
    name = _document(offered)
    return _rest(offered.given, name) | {"text": offered.given[name]}, ""


FORMATS = {
    format.name: format
    for format in (
        Format(
            "messages",
            "`messages` or `conversations`",
            ("messages", "conversations", "tools"),
            _fits_conversation,
            _unchanged,
        ),
        Format(
            "text",
            "`text`",
            ("text",),
            lambda offered: "it has `text`" if "text" in offered.given and _captioned(offered) != "text" else "",
            _unchanged,
        ),
        Format(
            "preference",
            "`chosen` and `rejected`, or `completion` and `label`",
            (*SIDES, "prompt", "messages", "conversations", "completion", "label"),
            lambda offered: "",  # detected by `RowFields.has_preference`, because it depends on the losses
            _unchanged,
        ),
        Format(
            "alpaca",
            "`instruction` and `output` (and maybe `input`, `history`, `system`)",
            ("instruction", "input", "output", "history", "system"),
            lambda offered: offered.has("instruction", "output"),
            _from_alpaca,
        ),
        Format(
            "prompt_completion",
            "`prompt` and `completion`, both texts or both messages",
            ("prompt", "completion", "tools"),
            lambda offered: offered.has("prompt", "completion"),
            _from_prompt,
        ),
        Format(
            "query_response",
            "`query` and `response` (and maybe `history`, `system`)",
            ("query", "response", "history", "system"),
            lambda offered: offered.has("query", "response"),
            _from_query,
        ),
        Format(
            "caption",
            "a column of media that the model reads, and `caption` (or a `text` without places for them)",
            ("caption",),
            lambda offered: _fits_caption(offered, offered.read),
            lambda offered: _from_captioned(offered, media_first=True),
        ),
        Format(
            "from_caption",
            "a column of media that the model produces, and `caption` (or a `text` without places for them)",
            ("caption",),
            lambda offered: _fits_caption(offered, offered.produced),
            lambda offered: _from_captioned(offered, media_first=False),
        ),
        Format(
            "document",
            f"one text and nothing else, under {', '.join(DOCUMENT)}",
            DOCUMENT,
            _fits_document,
            _from_document,
        ),
    )
}
