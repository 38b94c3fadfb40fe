"""Which format a row is written in, and why: a table of rules on its fields. Each format becomes `messages` or `text`.

A rule looks at which fields a row has, never at what its texts say. A row that several rules fit is not guessed at:
`data.sources.N.format` decides. Fields that a format does not take stay in the row, and are refused if nothing reads
them (data/row_fields.py).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnizoo.data.row_fields import HARMLESS, meaning, says_nothing
from omnizoo.data.row_media import read_column
from omnizoo.data.rows import SIDES, BadRow, Row

# Names of a plain text, where a row has nothing else to say.
DOCUMENT = (
    *("content", "body", "document", "article", "passage", "paragraph", "story", "page_content"),
    *("full_text", "plain_text", "raw_text", "raw_content", "code"),
)
# Prompts and answers under names that say too little of how they are meant; as a hint only.
OTHER_PAIRS = (
    *(("question", "answer"), ("question", "response"), ("question", "output"), ("input", "output")),
    *(("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("instruction", "response")),
    *(("instruction", "completion"), ("instruction", "answer"), ("query", "answer"), ("input", "response")),
    *(("input", "target"), ("inputs", "targets"), ("problem", "solution"), ("user", "assistant")),
)
LISTS = ("messages", "conversations", "history")  # which cannot be a text: one is JSON
EITHER = ("prompt", "completion", *SIDES)  # a text, or messages


@dataclass(frozen=True)
class Shape:
    """What is said of the rows of one source; `where` names it in messages."""

    where: str = "data.sources.N"
    format: str | None = None
    json_columns: Sequence[str] | None = None


@dataclass(frozen=True)
class Offered:
    """What a rule looks at. `given`: fields that say something; `names`: those that are there, be they empty."""

    given: Row
    names: Collection[str]
    read: Collection[str] = ()  # modalities with an encoder
    produced: Collection[str] = ()  # with a decoder

    @property
    def media(self) -> dict[str, str]:
        """Of each modality that the row has a column of: the column."""
        known = sorted({*self.read, *self.produced})
        return {name: column for name in known for column in (name, f"{name}s") if column in self.given}

    def has(self, *needed: str) -> str:
        """Why it fits, if all of these columns are there, and one of them says something."""
        if all(name in self.names for name in needed) and any(name in self.given for name in needed):
            return "it has " + " and ".join(f"`{name}`" for name in needed)
        return ""


@dataclass(frozen=True)
class Taken:
    """A row in its format: as `row`, it has `messages`, `conversations` or `text`, and what else it says."""

    format: str
    why: str
    row: Row
    prompt: str = ""  # what of a `text` the loss is not on
    left_out: tuple[str, ...] = ()  # fields of formats that were not chosen


@dataclass(frozen=True)
class Format:
    name: str
    rule: str  # in words, for messages and docs
    takes: tuple[str, ...]  # its fields
    fits: Callable[[Offered], str]  # why it is one; "": it is none
    convert: Callable[[Offered], tuple[Row, str]] = field(repr=False)  # the new row, and its prompt


NOTHING_SAID = Shape()


def which_format(
    row: Row,
    read: Collection[str] = (),
    produced: Collection[str] = (),
    shape: Shape = NOTHING_SAID,
    given: Row | None = None,
) -> Taken | None:
    """Which format a row is in, and why; None if no rule fits. BadRow if several do, or not the one that is asked for.

    `read` and `produced` are the modalities that the model has an encoder or a decoder for. `given`: what of the row is
    not to be ignored, where that is known.
    """
    if given is None:
        given = {name: value for name, value in row.items() if not says_nothing(value)}
    given = with_json(given, shape, {*read, *produced})
    offered = Offered(given, {name for name in row if row[name] is not None} | given.keys(), read, produced)
    found = {format.name: why for format in FORMATS.values() if (why := format.fits(offered))}
    if shape.format is not None:
        return _asked_for(FORMATS[shape.format], found, offered, shape)
    if len(found) > 1 and not found.keys() <= {"messages", "text"}:  # two conversations: data.ignore names one
        listed = " or ".join(f"{name} ({why})" for name, why in found.items())
        raise BadRow(f"it can be read as {listed}; set {shape.where}.format to one of {', '.join(found)}")
    if not found:
        return None
    name, why = next(iter(found.items()))
    return Taken(name, why, *FORMATS[name].convert(offered))


def _asked_for(format: Format, found: Mapping[str, str], offered: Offered, shape: Shape) -> Taken:
    if format.name not in found and not (format.name == "text" and "text" in offered.given):
        has = ", ".join(f"`{name}`" for name in offered.given) or "nothing"
        raise BadRow(f"{shape.where}.format is {format.name}, which needs {format.rule}; this row has {has}")
    own = {*format.takes, *offered.media.values()}
    others = {name for other in found for name in FORMATS[other].takes} - own
    left_out = tuple(name for name in offered.given if name in others and name not in ("system", "weight"))
    given = {name: value for name, value in offered.given.items() if name not in left_out}
    chosen = Offered(given, offered.names, offered.read, offered.produced)
    return Taken(format.name, f"{shape.where}.format says so", *format.convert(chosen), left_out)


def hint(given: Row, shape: Shape) -> str:
    """What to set for a row that no rule fits."""
    for prompt, answer in OTHER_PAIRS:
        if prompt in given and answer in given:
            return f"{shape.where}.columns: {{query: {prompt}, response: {answer}}} reads them as a chat"
    texts = [name for name, value in given.items() if isinstance(value, str) and name not in HARMLESS]
    if len(texts) == 1 == len([name for name in given if name not in HARMLESS]) and meaning(texts[0]) is None:
        return f"{shape.where}.columns: {{text: {texts[0]}}} reads it as a text"
    return ""


# JSON as text


def with_json(given: Row, shape: Shape, media: Collection[str]) -> Row:
    """`given` with what is written as JSON text read: lists of messages, lists of media, what json_columns names."""
    asked, changed = shape.json_columns, {}
    for name, value in given.items():
        if not isinstance(value, str):
            continue
        if (asked is not None and name in asked) or (name in LISTS and value.lstrip()[:1] in ("[", "{")):
            changed[name] = parse_json(value, name)
        elif name in EITHER and asked is None and _holds_messages(value):
            raise BadRow(
                f"`{name}` is a text that holds messages as JSON; {shape.where}.json_columns: [{name}] reads them, "
                "json_columns: [] leaves it a text"
            )
        elif name.removesuffix("s") in media or name in media:
            changed[name] = _list_of_media(value)
    return given | changed


def parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        python = " (written by Python's str(), not by json.dumps?)" if "'" in text else ""
        raise BadRow(f"`{name}` is a text, and not valid JSON: {str(error)[:200]}{python}") from None


def _holds_messages(text: str) -> bool:
    if text.lstrip()[:1] not in ("[", "{"):
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    messages = value if isinstance(value, list) else [value]
    ways = ({"role", "content"}, {"from", "value"})
    return bool(messages) and all(isinstance(m, dict) and any(way <= m.keys() for way in ways) for m in messages)


def _list_of_media(text: str) -> Any:
    """A path may begin with a bracket, too."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list | dict) else text


# From each format to messages or a text


def _unchanged(offered: Offered) -> tuple[Row, str]:
    return offered.given, ""


def _text(given: Row, name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise BadRow(f"`{name}` is {type(value).__name__}, not a text")
    return value


def _answer(given: Row, name: str) -> str:
    if not (answer := _text(given, name)):
        raise BadRow(f"`{name}` is empty: there is no answer to learn")
    return answer


def _rest(given: Row, *taken: str) -> Row:
    return {name: value for name, value in given.items() if name not in taken}


def _history(given: Row) -> list[Row]:
    """Earlier turns: pairs of a prompt and its answer."""
    turns: list[Row] = []
    history = given.get("history", [])
    pairs = history if isinstance(history, list | tuple) else [history]
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(f"`history` is not a list of pairs of texts [prompt, answer]: see its entry {number}")
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


def _chat(given: Row, prompt: str, answer: str) -> list[Row]:
    if not prompt:
        raise BadRow("its prompt is empty")
    turns = {"user": prompt, "assistant": answer}
    return [*_history(given), *({"role": role, "content": text} for role, text in turns.items())]


def _from_alpaca(offered: Offered) -> tuple[Row, str]:
    given = offered.given
    prompt = "\n".join(part for part in (_text(given, "instruction"), _text(given, "input")) if part)
    chat = _chat(given, prompt, _answer(given, "output"))
    return _rest(given, "instruction", "input", "output", "history") | {"messages": chat}, ""


def _from_query(offered: Offered) -> tuple[Row, str]:
    given = offered.given
    chat = _chat(given, _text(given, "query"), _answer(given, "response"))
    return _rest(given, "query", "response", "history") | {"messages": chat}, ""


def _from_prompt(offered: Offered) -> tuple[Row, str]:
    """Texts are one text, of which the completion is learnt; messages one conversation, of which likewise."""
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
    told = ({key: value for key, value in m.items() if key not in ("loss", "train", "weight")} for m in before)
    return rest | {"messages": [*(message | {"loss": False} for message in told), *answer]}, ""


def _captioned(offered: Offered) -> str:
    """The field that is the caption of the row's media: a `text` is one if it has no places for them."""
    given, media = offered.given, offered.media
    if not media or any(name in given for name in ("messages", "conversations")):
        return ""
    if isinstance(given.get("caption"), str):
        return "caption"
    text = given.get("text")
    return "text" if isinstance(text, str) and not any(f"<{name}>" in text for name in media) else ""


def _fits_caption(offered: Offered, modalities: Collection[str]) -> str:
    media, caption = offered.media, _captioned(offered)
    if not caption or not all(name in modalities for name in media):
        return ""
    columns = " and ".join(f"`{column}`" for column in media.values())
    return f"it has {columns}, and `{caption}` for a caption"


def _from_captioned(offered: Offered, media_first: bool) -> tuple[Row, str]:
    given, caption, items = offered.given, _captioned(offered), []
    for name, column in offered.media.items():
        items += [{"type": name, name: item} for item in read_column({column: given[column]}, name) or []]
    text = [{"type": "text", "text": given[caption]}]
    parts = [*items, *text] if media_first else [*text, *items]
    return _rest(given, caption, *offered.media.values()) | {"text": parts}, ""


def _document(offered: Offered) -> str:
    """The only field that is not known to be harmless, if it is a text of such a name."""
    fields = [name for name in offered.given if name not in HARMLESS and name != "weight"]
    is_text = len(fields) == 1 and fields[0] in DOCUMENT and isinstance(offered.given[fields[0]], str)
    return fields[0] if is_text else ""


def _fits_conversation(offered: Offered) -> str:
    name = next((name for name in ("messages", "conversations") if name in offered.given), "")
    return f"it has `{name}`" if name else ""


def _fits_document(offered: Offered) -> str:
    name = _document(offered)
    return f"all it says is `{name}`, a text" if name else ""


def _from_document(offered: Offered) -> tuple[Row, str]:
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
            lambda offered: "",  # what reads preferences are the losses of the run (row_fields.py)
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
