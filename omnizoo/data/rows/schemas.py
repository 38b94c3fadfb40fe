"""Detect the format of a row, and convert the row to `messages` or `text`.

The table `FORMATS` has a rule for each format. A rule depends on the names and types of fields. It does not depend on
the content of a text, with one exception: a text with media tags is not a caption. If several rules match, the row is a
bad row unless `data.sources.N.format` selects one. Fields that a format does not use stay in the row, and
`unused_fields.py` checks them.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omnizoo.data.row import CHAT_PROMPTS, DEFAULT_SCHEMA, PROMPTS, SIDES, BadRow, Fix, Row, SourceSchema
from omnizoo.data.rows.media import read_column
from omnizoo.data.rows.messages import as_prompt, parse
from omnizoo.data.rows.tokenized import TOKEN_FIELDS_OF_ROWS
from omnizoo.data.rows.unused_fields import METADATA_FIELDS, unsupported_reason

# Names of fields that are read as plain text if the row has no other content.
DOCUMENT = (
    *("content", "body", "document", "article", "passage", "paragraph", "story", "page_content"),
    *("full_text", "plain_text", "raw_text", "raw_content", "code"),
)
# Names of prompts and responses that are not read because they are ambiguous. Error messages suggest to rename them.
OTHER_PAIRS = (
    *(("question", "answer"), ("question", "response"), ("question", "output"), ("input", "output")),
    *(("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "response")),
    *(("instruction", "completion"), ("instruction", "answer"), ("query", "answer"), ("input", "response")),
    *(("input", "target"), ("inputs", "targets"), ("problem", "solution"), ("problem", "answer")),
    *(("question", "solution"), ("user", "assistant"), ("human", "assistant"), ("dialogue", "summary")),
)
# Names of the two responses of a preference pair that are not read because they are ambiguous.
OTHER_SIDES = (
    *(("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"), ("accepted", "rejected")),
    *(("preferred", "dispreferred"), ("better", "worse")),
)
# Names of fields with the transcript of an audio item or the description of an image.
TRANSCRIPTS = ("sentence", "transcription", "transcript", "raw_transcription", "normalized_text", "description")
# Formats in the order in which `omnizoo new` prefers them for rows that match several of them.
PREFERRED = ("messages", "alpaca", "query_response", "prompt_completion", "caption", "from_caption", "text")
TOKEN_NAMES = ("token_ids", "tokens")  # other names of `input_ids`; error messages suggest how to rename them
LISTS = ("messages", "conversations", "history")  # fields whose strings are parsed as JSON, because they contain lists
EITHER = ("prompt", "completion", *SIDES)  # fields that contain either a text or messages


@dataclass(frozen=True)
class SchemaInput:
    """The input of a rule: the fields of a row, and the modalities of the model."""

    present: Row  # fields that are not empty
    names: Collection[str]  # names of all fields of the row, including empty ones
    encoded: Collection[str]  # modalities with an encoder
    decoded: Collection[str]  # modalities with a decoder

    @property
    def media(self) -> dict[str, str]:
        """Name of the media column of each modality that the row has media of."""
        columns = {}
        for name in sorted({*self.encoded, *self.decoded}):
            for column in (name, f"{name}s"):
                if column in self.present:
                    columns[name] = column
        return columns

    def has(self, *required: str) -> str:
        """Return the reason for a match if the row has all `required` fields and at least one of them is not empty.

        Otherwise, return "".
        """
        if all(name in self.names for name in required) and any(name in self.present for name in required):
            return "the row has " + " and ".join(f"`{name}`" for name in required)
        return ""


@dataclass(frozen=True)
class ParsedRow:
    """A row whose format was detected, converted to `messages`, `conversations`, `text` or `input_ids`."""

    format: str  # name of the format
    why: str  # reason for the match
    row: Row  # the converted row, including the fields that the format does not use
    prompt: str = ""  # beginning of `text` that is not trained on


@dataclass(frozen=True)
class Format:
    """One entry of the table of row formats."""

    name: str
    rule: str  # description of the required fields, for error messages and docs
    takes: tuple[str, ...]  # fields that the format uses
    fits: Callable[[SchemaInput], str]  # returns the reason for a match, or "" if the row has another format
    convert: Callable[[SchemaInput], tuple[Row, str]] = field(repr=False)  # returns `row` and `prompt` of a ParsedRow


def parse_row(
    row: Row,
    present: Row,
    encoded: Collection[str] = (),
    decoded: Collection[str] = (),
    schema: SourceSchema = DEFAULT_SCHEMA,
) -> ParsedRow | None:
    """Detect the format of a row without preferences, and convert the row.

    Args:
        row: The whole row.
        present: The fields of the row that are neither empty nor ignored.
        encoded: Modalities for which the model has an encoder.
        decoded: Modalities for which the model has a decoder.
        schema: Settings of the source. They may select a format.

    Returns:
        The converted row, or None if no rule matches.

    Raises:
        BadRow: If several rules match, or the row does not match the selected format.
    """
    present = with_json(present, schema, {*encoded, *decoded})
    names = {name for name in row if row[name] is not None} | present.keys()
    schema_input = SchemaInput(present=present, names=names, encoded=encoded, decoded=decoded)
    reasons = {format.name: format.fits(schema_input) for format in FORMATS.values()}
    matches = {name: reason for name, reason in reasons.items() if reason}
    if schema.format is not None:
        return _parse_as(FORMATS[schema.format], matches, schema_input, schema)
    # For `messages` with `text`, `check_conversation` raises an error that suggests data.ignore.
    if len(matches) > 1 and not matches.keys() <= {"messages", "text"}:
        formats = " or ".join(f"{name} ({reason})" for name, reason in matches.items())
        raise BadRow(
            f"the row matches {formats}. Set {schema.key}.format to one of {', '.join(matches)}.",
            _format_fixes(matches, schema),
        )
    if not matches:
        return None
    name, reason = next(iter(matches.items()))
    converted, prompt = FORMATS[name].convert(schema_input)
    return ParsedRow(format=name, why=reason, row=converted, prompt=prompt)


def _parse_as(format: Format, matches: Mapping[str, str], schema_input: SchemaInput, schema: SourceSchema) -> ParsedRow:
    """Convert a row whose format is set by `data.sources.N.format`.

    Fields that only other formats use are dropped.

    Raises:
        BadRow: If the row lacks fields that the format needs.
    """
    present = schema_input.present
    if format.name not in matches and not (format.name == "text" and "text" in present):
        names = ", ".join(f"`{name}`" for name in present) or "no fields"
        raise BadRow(f"{schema.key}.format is {format.name}, which needs {format.rule}; the row has {names}")
    used = {*format.takes, *schema_input.media.values()}
    fields_of_others = {name for other in matches for name in FORMATS[other].takes}
    dropped = fields_of_others - used - {"system", "weight"}
    converted, prompt = format.convert(replace(schema_input, present=_without(present, *dropped)))
    return ParsedRow(format=format.name, why=f"set by {schema.key}.format", row=converted, prompt=prompt)


def _format_fixes(matches: Collection[str], schema: SourceSchema) -> list[Fix]:
    """Return one fix for each format that a row matches, in the order of `PREFERRED`."""
    order = [*PREFERRED, *FORMATS]
    formats = sorted(matches, key=order.index)
    reason = f"the rows match {' and '.join(formats)}"
    return [Fix(f"{schema.key}.format", format, reason) for format in formats]


def columns_fixes(row: Row, present: Row, schema: SourceSchema, media: Collection[str] = ()) -> list[Fix]:
    """Return changes of `columns` that make a row readable although no rule matches it.

    Args:
        row: The whole row.
        present: The fields that are neither empty nor ignored.
        schema: Settings of the source.
        media: Names of the modalities of the model.

    Returns:
        One fix, or an empty list. The value of the fix is None if the names of the fields do not show which text is the
        prompt and which one the response, so that the user must choose.
    """
    columns, purpose = _columns_of(row, present, media)
    renamed = {name: field for name, field in columns.items() if name != field}
    if renamed:
        return [Fix(f"{schema.key}.columns", renamed, purpose)]
    texts = [name for name in present if isinstance(present[name], str) and name not in METADATA_FIELDS]
    if len(texts) < 2:
        return []
    listed = ", ".join(texts)
    reason = f"which of {listed} is the prompt, and which one the response; or {{text: FIELD}} for plain text"
    return [Fix(f"{schema.key}.columns", None, reason)]


def _columns_of(row: Row, present: Row, media: Collection[str]) -> tuple[dict[str, str], str]:
    """Return the columns to rename in a row that no rule matches, and the purpose. Both are empty if there are none."""
    for name, value in present.items():
        if isinstance(value, list) and value and all(map(_is_message, value)):
            return {"messages": name}, "to read it as a chat"
    for chosen, rejected in OTHER_SIDES:
        if chosen in present and rejected in present:
            return {"chosen": chosen, "rejected": rejected}, "to read them as a preference pair"
    for prompt, response in OTHER_PAIRS:
        if prompt in present and response in present:
            if "context" in row:  # even if it is empty in this row
                return {"instruction": prompt, "input": "context", "output": response}, "to read them as a chat"
            return {"query": prompt, "response": response}, "to read them as a chat"
    for name in TOKEN_NAMES:
        if name in present:
            return {"input_ids": name}, "to read it as token ids"
    return _columns_of_text(present, media)


def _columns_of_text(present: Row, media: Collection[str]) -> tuple[dict[str, str], str]:
    """Return the columns to rename in a row with one text, and the purpose. With media, the text is a caption."""
    names = [name for name in present if name not in METADATA_FIELDS]
    media_columns = [name for name in names if name in media or name.removesuffix("s") in media]
    texts = [name for name in names if isinstance(present[name], str) and name not in media_columns]
    transcripts = [name for name in TRANSCRIPTS if name in texts] or (texts if len(texts) == 1 else [])
    if media_columns and transcripts:
        return {"caption": transcripts[0]}, "to read it as a transcript or caption"
    if names == texts and len(names) == 1 and unsupported_reason(names[0]) is None:
        return {"text": names[0]}, "to read it as a text"
    return {}, ""


def prompt_fixes(present: Row, schema: SourceSchema) -> list[Fix]:
    """Return changes of `columns` for a preference row whose prompt has another name; empty if there are none."""
    if any(name in present for name in (*PROMPTS, *CHAT_PROMPTS)) or not isinstance(present.get("chosen"), str):
        return []
    prompts = [prompt for prompt, _ in OTHER_PAIRS if isinstance(present.get(prompt), str)]
    return [Fix(f"{schema.key}.columns", {"query": prompts[0]}, "to read it as the prompt")] if prompts else []


# Fields that contain JSON as text


def with_json(present: Row, schema: SourceSchema, media: Collection[str]) -> Row:
    """Parse the fields that contain JSON as text: lists of messages, lists of media, and the `json_columns`.

    Args:
        present: The fields that are neither empty nor ignored.
        schema: Settings of the source.
        media: Names of the modalities of the model.

    Raises:
        BadRow: If the JSON is not valid, or if it is unclear whether a field contains JSON or a text.
    """
    json_columns = schema.json_columns
    parsed = {}
    for name, value in present.items():
        if not isinstance(value, str):
            continue
        is_json_column = json_columns is not None and name in json_columns
        if is_json_column or (name in LISTS and _looks_like_json(value)):
            parsed[name] = parse(value, f"`{name}`")
        elif name in EITHER and json_columns is None and _has_messages(value):
            raise BadRow(
                f"`{name}` is a string that contains messages as JSON. Set {schema.key}.json_columns: [{name}] to "
                "parse it, or json_columns: [] to keep it as text."
            )
        elif name.removesuffix("s") in media or name in media:
            json_value = _list_or_object(value)
            parsed[name] = value if json_value is None else json_value
    return present | parsed


def _looks_like_json(text: str) -> bool:
    """Whether a text begins like a JSON list or object."""
    return text.lstrip()[:1] in ("[", "{")


def _has_messages(text: str) -> bool:
    """Whether a text is the JSON of a message or of a list of messages."""
    value = _list_or_object(text)
    messages = value if isinstance(value, list) else [value]
    return bool(messages) and all(map(_is_message, messages))


def _is_message(value: Any) -> bool:
    """Whether a value is a message in one of the two common conventions."""
    if not isinstance(value, dict):
        return False
    return {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()


def _list_or_object(text: str) -> Any:
    """Parse a JSON list or object. Return None for other text, such as a path that begins with a bracket."""
    if not _looks_like_json(text):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# Conversions of the formats to messages or a text. Each of them returns `row` and `prompt` of a `ParsedRow`.


def _unchanged(schema_input: SchemaInput) -> tuple[Row, str]:
    """Return the row unchanged."""
    return schema_input.present, ""


def _text(present: Row, name: str) -> str:
    """Return a text field, or "" if it is absent. Raises `BadRow` if it is not a string."""
    value = present.get(name, "")
    if not isinstance(value, str):
        raise BadRow(f"`{name}` is {type(value).__name__}; expected a string")
    return value


def _response(present: Row, name: str) -> str:
    """Return a text field that contains the response. Raises `BadRow` if it is empty."""
    response = _text(present, name)
    if not response:
        raise BadRow(f"`{name}` is empty, so the row has no response to train on")
    return response


def _without(present: Row, *names: str) -> Row:
    """Return the row without the fields `names`."""
    return {name: value for name, value in present.items() if name not in names}


def _turns(prompt: str, response: str) -> list[Row]:
    """Return a user message and an assistant message."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _history(present: Row) -> list[Row]:
    """Return the messages of the field `history`, a list of [prompt, response] pairs; empty if it is absent."""
    turns: list[Row] = []
    history = present.get("history", [])
    pairs = history if isinstance(history, list | tuple) else [history]
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(f"entry {number} of `history` is not a pair of strings; expected [prompt, response]")
        turns += _turns(*pair)
    return turns


def _chat(present: Row, prompt: str, response: str) -> list[Row]:
    """Return the messages of a conversation: its history, the prompt and the response."""
    if not prompt:
        raise BadRow("the prompt is empty")
    return [*_history(present), *_turns(prompt, response)]


def _instruction(present: Row) -> str:
    """Return the prompt of an instruction row: `instruction`, a line break and `input`."""
    prompt_parts = [_text(present, "instruction"), _text(present, "input")]
    return "\n".join(filter(None, prompt_parts))


def chat_prompt(present: Row) -> list[Row]:
    """Return the prompt of a preference row as messages, from `query` or `instruction`, `input` and `history`."""
    prompt = _text(present, "query") or _instruction(present)
    if not prompt:
        raise BadRow("the prompt is empty")
    return [*_history(present), {"role": "user", "content": prompt}]


def _from_alpaca(schema_input: SchemaInput) -> tuple[Row, str]:
    """Convert `instruction`, `input`, `output` and `history` to messages."""
    present = schema_input.present
    chat = _chat(present, _instruction(present), _response(present, "output"))
    return _without(present, "instruction", "input", "output", "history") | {"messages": chat}, ""


def _from_query(schema_input: SchemaInput) -> tuple[Row, str]:
    """Convert `query`, `response` and `history` to messages."""
    present = schema_input.present
    chat = _chat(present, _text(present, "query"), _response(present, "response"))
    return _without(present, "query", "response", "history") | {"messages": chat}, ""


def _from_prompt(schema_input: SchemaInput) -> tuple[Row, str]:
    """Join `prompt` and `completion` into one text or conversation, in which only the completion is trained on."""
    present = schema_input.present
    others = _without(present, "prompt", "completion")
    prompt = present.get("prompt", "")
    completion = present.get("completion", "")
    if isinstance(prompt, str) and isinstance(completion, str):
        return others | {"text": prompt + _response(present, "completion")}, prompt
    if not isinstance(prompt, list | dict) or not isinstance(completion, list | dict):
        types = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise BadRow(f"`prompt` and `completion` are {types}; expected two strings, or two lists of messages")

    prompt_messages = [prompt] if isinstance(prompt, dict) else prompt
    response_messages = [completion] if isinstance(completion, dict) else completion
    messages = [*prompt_messages, *response_messages]
    is_valid = bool(prompt_messages) and bool(response_messages)
    if not is_valid or not all(isinstance(message, dict) for message in messages):
        raise BadRow("`prompt` and `completion` must both be non-empty lists of messages")
    return others | {"messages": [*as_prompt(prompt_messages), *response_messages]}, ""


def _caption_field(schema_input: SchemaInput) -> str:
    """Return the name of the caption field in a row with media: `caption`, or a `text` without media tags.

    Return "" if the row has no media, no caption, or a conversation.
    """
    present = schema_input.present
    media = schema_input.media
    if not media or any(name in present for name in ("messages", "conversations")):
        return ""
    if isinstance(present.get("caption"), str):
        return "caption"
    text = present.get("text")
    if isinstance(text, str) and not any(f"<{name}>" in text for name in media):
        return "text"
    return ""


def _fits_caption(schema_input: SchemaInput, modalities: Collection[str]) -> str:
    """Return the reason for a match if the row has a caption and all its media have one of `modalities`; else ""."""
    media = schema_input.media
    caption = _caption_field(schema_input)
    if not caption or not all(name in modalities for name in media):
        return ""
    columns = " and ".join(f"`{column}`" for column in media.values())
    return f"the row has {columns}, and `{caption}` as a caption"


def _from_captioned(schema_input: SchemaInput, media_first: bool) -> tuple[Row, str]:
    """Convert media columns and a caption to a `text` that is a list of parts.

    Args:
        schema_input: The row.
        media_first: Whether the media precede the caption.
    """
    present = schema_input.present
    caption = _caption_field(schema_input)
    items: list[Row] = []
    for name, column in schema_input.media.items():
        values = read_column({column: present[column]}, name) or []
        items += [{"type": name, name: value} for value in values]
    text = {"type": "text", "text": present[caption]}
    parts = [*items, text] if media_first else [text, *items]
    return _without(present, caption, *schema_input.media.values()) | {"text": parts}, ""


def _document_field(schema_input: SchemaInput) -> str:
    """Return the name of the field with a plain text if it is in `DOCUMENT` and the only content; otherwise ""."""
    present = schema_input.present
    fields = [name for name in present if name not in METADATA_FIELDS and name != "weight"]
    is_document = len(fields) == 1 and fields[0] in DOCUMENT and isinstance(present[fields[0]], str)
    return fields[0] if is_document else ""


def _fits_conversation(schema_input: SchemaInput) -> str:
    """Return the reason for a match if the row has messages, otherwise ""."""
    for name in ("messages", "conversations"):
        if name in schema_input.present:
            return f"the row has `{name}`"
    return ""


def _fits_text(schema_input: SchemaInput) -> str:
    """Return the reason for a match if the row has a `text` that is not a caption, otherwise ""."""
    is_text = "text" in schema_input.present and _caption_field(schema_input) != "text"
    return "the row has `text`" if is_text else ""


def _fits_document(schema_input: SchemaInput) -> str:
    """Return the reason for a match if the only content of the row is a plain text, otherwise ""."""
    name = _document_field(schema_input)
    return f"the only content of the row is the text `{name}`" if name else ""


def _from_document(schema_input: SchemaInput) -> tuple[Row, str]:
    """Rename the field with the plain text to `text`."""
    name = _document_field(schema_input)
    return _without(schema_input.present, name) | {"text": schema_input.present[name]}, ""


def _fits_tokenized(schema_input: SchemaInput) -> str:
    """Return the reason for a match if the row has token ids, otherwise ""."""
    return "the row has `input_ids`" if "input_ids" in schema_input.present else ""


def _from_tokenized(schema_input: SchemaInput) -> tuple[Row, str]:
    """Return the row, including empty labels and masks, so that their lengths are checked.

    Raises:
        BadRow: If the row has media.
    """
    for column in schema_input.media.values():
        raise BadRow(
            f"a pre-tokenized row cannot have media (`{column}`), because the number of their tokens depends on the "
            "model. Use `messages` or `text`."
        )
    present = schema_input.present
    empty = [name for name in TOKEN_FIELDS_OF_ROWS if name in schema_input.names and name not in present]
    return present | {name: [] for name in empty}, ""


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
            _fits_text,
            _unchanged,
        ),
        Format(
            "preference",
            "`chosen` and `rejected`, or `completion` and `label`",
            (*SIDES, "prompt", "messages", "conversations", "completion", "label"),
            lambda schema_input: "",  # detected by `RowFields.has_preference`, because it depends on the losses
            _unchanged,
        ),
        Format(
            "alpaca",
            "`instruction` and `output` (optional: `input`, `history`, `system`)",
            ("instruction", "input", "output", "history", "system"),
            lambda schema_input: schema_input.has("instruction", "output"),
            _from_alpaca,
        ),
        Format(
            "prompt_completion",
            "`prompt` and `completion`, both strings or both messages",
            ("prompt", "completion", "tools"),
            lambda schema_input: schema_input.has("prompt", "completion"),
            _from_prompt,
        ),
        Format(
            "query_response",
            "`query` and `response` (optional: `history`, `system`)",
            ("query", "response", "history", "system"),
            lambda schema_input: schema_input.has("query", "response"),
            _from_query,
        ),
        Format(
            "caption",
            "a media column that the model has an encoder for, and `caption` (or a `text` without media tags)",
            ("caption",),
            lambda schema_input: _fits_caption(schema_input, schema_input.encoded),
            lambda schema_input: _from_captioned(schema_input, media_first=True),
        ),
        Format(
            "from_caption",
            "a media column that the model has a decoder for, and `caption` (or a `text` without media tags)",
            ("caption",),
            lambda schema_input: _fits_caption(schema_input, schema_input.decoded),
            lambda schema_input: _from_captioned(schema_input, media_first=False),
        ),
        Format(
            "document",
            f"one text and no other content, in one of {', '.join(DOCUMENT)}",
            DOCUMENT,
            _fits_document,
            _from_document,
        ),
        Format(
            "tokenized",
            "`input_ids` (optional: `labels`, `loss_mask`, `attention_mask`, `position_ids`, `cu_seqlens`)",
            TOKEN_FIELDS_OF_ROWS,
            _fits_tokenized,
            _from_tokenized,
        ),
    )
}
