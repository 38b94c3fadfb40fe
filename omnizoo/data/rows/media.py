"""Read the media items of a row (content parts, tags, columns, paths, bytes, numbers) and measure them.

The model defines the modalities. The name of a modality is also its content type, `<NAME>` is its tag in a text, and
`NAMEs` is the column that contains the items of the tags.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from omnizoo.data.row import BadRow, Row
from omnizoo.data.rows.unused_fields import RowFields
from omnizoo.data.sources.remote import is_address
from omnizoo.modalities.base import Decoder, Encoder, Follower, LikelihoodDecoder, Modality
from omnizoo.modalities.item import MediaItem, MediaSize, NestedRun, Port
from omnizoo.modalities.media import WELL_KNOWN, BadMedia, Media

Find = Callable[[str], Path | bytes]  # returns a media file, or its content, by its name in a row

ENCODED, NAMED = ("bytes", "data", "base64"), ("url", "path")  # keys of an object that contains or locates an item
DESCRIBES = ("format", "mime_type")  # keys that are not needed: the format is detected from the bytes
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MOVED = "the chat template leaves out or changes the place of {name}"
PATH_MAX = 4096  # characters; a longer string is not a path


class MediaNotation:
    """The notation of media: content types and tags in rows, special tokens in the text to be tokenized."""

    def __init__(self, modalities: Mapping[str, Modality], fields: RowFields) -> None:
        self.modalities, self.fields = modalities, fields
        self.types = {type: name for name in modalities for type in (name, f"{name}_url", f"input_{name}")}
        marks = {
            mark for m in modalities.values() for mark in (m.begin, m.placeholder, m.end, m.last, *m.marks) if mark
        }
        self.mark = re.compile("|".join(map(re.escape, sorted(marks))) or "(?!)")  # (?!) never matches
        self.tag = re.compile(f"<({'|'.join(map(re.escape, modalities)) or '(?!)'})>")
        # Tags of well-known modalities that this model lacks, at positions typical of media: at the start of a line,
        # or at the end of the text.
        foreign = [name for name in WELL_KNOWN if name not in modalities and f"<{name}>" not in fields.names]
        names = "|".join(foreign) or "(?!)"
        self.stray = re.compile(rf"^[ \t]*<({names})>|<({names})>\s*\Z", re.MULTILINE)

    def written(self, name: str, run: str | int | NestedRun) -> str:
        """Return the text of one run of an item. Placeholder tokens are repeated only after tokenization."""
        if isinstance(run, str):
            return run
        return self.modalities[run.modality if isinstance(run, NestedRun) else name].placeholder


class RowMedia:
    """Converts the contents of one row to text for the tokenizer, and collects their media items in order.

    Args:
        notation: Tags and special tokens of the modalities.
        row: The row, whose media columns provide the items of tags.
        find: Returns the media files that the row refers to.
        key: Seed, source, epoch and row number, from which the random seeds of items are derived.
        is_chat: Whether items are written in the notation of the chat template (`Modality.in_chat`).
    """

    def __init__(
        self, notation: MediaNotation, row: Row, find: Find, key: tuple[int, ...], is_chat: bool = True
    ) -> None:
        self.notation, self.find, self.key, self.is_chat = notation, find, key, is_chat
        self.columns = {name: column for name in notation.modalities if (column := read_column(row, name)) is not None}
        self.taken: Counter[str] = Counter()  # number of tags so far, by modality; may exceed the items in the column
        self.items: list[MediaItem] = []  # spans are set after tokenization
        self.texts: list[str] = []  # text of each item: begin, inner text and placeholders, end; "" for followers
        self.of_prompt: int | None = None  # number of items before the response of a preference; None before it begins
        self.answers = 0  # number of assistant messages so far
        self.role: str | None = None  # role of the current message

    def begin_answer(self, find: Find) -> None:
        """Begin the response of a preference. `find` returns the media files that the response refers to."""
        self.find, self.of_prompt = find, len(self.items)

    def begin(self, role: str) -> None:
        """Begin a message of the given role."""
        self.role = role
        self.answers += role == "assistant"

    def write(self, content: Any, has_targets: bool, what: str) -> str:
        """Return the content of a message or text as text for the tokenizer, and collect its items.

        Args:
            content: A string, in which tags stand for items, or a list of parts.
            has_targets: Whether the content is trained on.
            what: Name of the content in error messages.
        """
        if isinstance(content, str):
            if "<" in content:
                self._refuse_strays(content, what)
            pieces = self.notation.tag.split(content)  # odd indices are the names of tags
            return "".join(
                self._item(p, None, {}, has_targets) if i % 2 else self.text(p) for i, p in enumerate(pieces)
            )
        if not isinstance(content, list):
            raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
        return "".join(self.part(part, has_targets, f"part {i} of {what}") for i, part in enumerate(content))

    def text(self, text: str) -> str:
        """Return plain text. Raises `BadRow` if it contains a special token of a modality."""
        if mark := self.notation.mark.search(text):
            raise BadRow(f"its text contains {mark[0]!r}, which would be taken for media")
        return text

    def _refuse_strays(self, content: str, what: str) -> None:
        """Raise `BadRow` for a tag of a modality that this model lacks, unless an end tag shows that it is markup."""
        for match in self.notation.stray.finditer(content):
            name = match[1] or match[2]
            if f"</{name}>" not in content:
                known = ", ".join(self.notation.modalities) or "none"
                raise BadRow(
                    f"{what} has a <{name}>, which nothing reads: of media, this model reads {known}; if it is only "
                    f"text, put it into a part of type text, or '<{name}>' into data.ignore"
                )

    def part(self, part: Any, has_targets: bool, what: str) -> str:
        """Return one content part as text, and collect its item if it is media."""
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRow(f"{what} is not an object with a `type`")
        kind = part["type"]
        # Columnar files give every part the union of all keys, so None means that the key is absent.
        given = {key: value for key, value in part.items() if key != "type" and value is not None}
        if kind == "text":
            if not isinstance(given.get("text"), str):
                raise BadRow(f"`text` of {what} is {type(given.get('text')).__name__}, not a string")
            self.notation.fields.check_read(given, ("text",), f" of {what}")
            return self.text(given["text"])
        name = self.notation.types.get(kind)
        if name is None:
            known = ["text", *self.notation.modalities]
            close = get_close_matches(kind, ["text", *self.notation.types], 1)
            raise BadRow(
                f"{what} is of unknown type {kind!r}; known: {', '.join(known)}"
                + (f" (did you mean {close[0]!r}?)" if close else "")
            )
        made = self.notation.modalities[name].decoder or self.notation.modalities[name].follower
        names = (kind, name, f"{name}_url", *(made.values if made is not None else ()))
        key = next((key for key in names if key in given), None)
        # Without such a key, the part itself may contain or locate the item, like {"type": "image", "path": ...}.
        value = given.pop(key) if key else {key: given.pop(key) for key in ENCODED + NAMED if key in given} or None
        given = {key: option for key, option in given.items() if not self.notation.fields.ignores(key)}
        return self._item(name, value, given, has_targets)

    def _item(self, name: str, value: Any, options: dict[str, Any], has_targets: bool) -> str:
        """Return an item as text, and collect it. If `value` is None, take the next item of the column."""
        if value is None:
            column, index = self._next_of_column(name)
            if index >= len(column):
                return ""  # `check_counts` raises the error, with both numbers
            value = column[index]
        modality = self.notation.modalities[name]
        module, is_target = self._module_of_item(name, has_targets)
        media, size = self._measure(name, value, options, module)
        if isinstance(module, Follower):
            if is_target:  # followers do not use messages that are not trained on
                self._add_followed(name, media, size)
            return ""

        runs = size.layout or (size.num_placeholders,)
        assert sum(run for run in runs if isinstance(run, int)) == size.num_placeholders, f"{name}: {size}"
        if not size.num_placeholders:
            raise BadRow(f"{media.name} takes no place among the tokens")
        inner = "".join(self.notation.written(name, run) for run in runs)
        port = Port(name, "decoder" if module is modality.decoder else "encoder")
        self.items.append(MediaItem(port, size, (), is_target, media))
        self.texts.append(modality.begin + inner + modality.end)
        written = self.texts[-1].strip()  # chat templates may strip contents; `widen` restores the white space
        number = sum(item.port.modality == name for item in self.items)
        return modality.in_chat.format(item=written, number=number, before=number - 1) if self.is_chat else written

    def _next_of_column(self, name: str) -> tuple[Sequence[Any], int]:
        """Return the column of a modality and the index of the next item. Advances the index."""
        if self.of_prompt is not None:
            example = json.dumps({"type": name, name: "..."})
            raise BadRow(
                f"an answer of a preference has a <{name}>, but `{name}s` is for media of its prompt; write it as "
                f"a part of the answer: {example}"
            )
        index = self.taken[name]
        self.taken[name] += 1
        return self.columns.get(name, []), index

    def _module_of_item(self, name: str, has_targets: bool) -> tuple[Encoder | Decoder | Follower, bool]:
        """Return the module of the next item, and whether the item is a target."""
        modality = self.notation.modalities[name]
        label = f"{name} (item {len(self.items)})"
        if modality.follower is not None and modality.encoder is None and self.role != "assistant":
            where = f"a message of {self.role!r}" if self.role else "a plain text"
            known = ", ".join(["text", *(name for name, m in self.notation.modalities.items() if m.encoder)])
            raise BadRow(
                f"{label} is in {where}: it is what the model says, and so belongs to a message of the assistant; what "
                f"the model is to read is one of {known}"
            )
        producer = modality.decoder or modality.follower
        is_target = has_targets and producer is not None
        module: Encoder | Decoder | Follower | None = modality.encoder
        if producer is not None and (has_targets or module is None):
            module = producer
        assert module is not None, f"modality {name} has no module"
        if self.of_prompt is not None and is_target:
            if isinstance(module, Follower):
                raise BadRow(f"{label} is in an answer of a preference, which is judged by its text; leave it out")
            if not isinstance(module, Encoder | LikelihoodDecoder):
                reason = module.no_likelihood_reason
                raise BadRow(f"{label} is in an answer, which is judged by how likely it is; but {reason}")
        return module, is_target

    def _measure(
        self, name: str, value: Any, options: dict[str, Any], module: Encoder | Decoder | Follower
    ) -> tuple[Media, MediaSize]:
        """Read the value of an item from its row, and measure the item. Converts `BadMedia` to `BadRow`."""
        label = f"{name} (item {len(self.items)})"
        try:
            value, options_of_value = read_value(value, self.find)
            options = options_of_value | options
            media = Media(name, value, options, seed_of(*self.key, len(self.items)))
            label = media.name
            if module.item_options is not None:
                self.notation.fields.check_read(options, {*module.item_options, *DESCRIBES}, f" of {label}")
            return media, module.measure(media)
        except BadMedia as bad:
            raise BadRow(str(bad) if label in str(bad) else f"{label}: {bad}") from None

    def _add_followed(self, name: str, media: Media, size: MediaSize) -> None:
        """Add an item that a follower generates. It has no text in the sequence."""
        answer = self.answers - 1
        if any(item.answer == answer and item.port.modality == name for item in self.items):
            raise BadRow(f"{media.name}: the assistant's message has a {name} already; give one per message")
        self.items.append(MediaItem(Port(name, "follower"), size, (), True, media, answer=answer))
        self.texts.append("")

    def widen(self, text: str, marks: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Restore white space around items, which chat templates may strip.

        Args:
            text: The output of the chat template.
            marks: Character indices in `text`.

        Returns:
            The text with white space restored, and the corresponding indices in it.
        """
        if all(whole == whole.strip() for whole in self.texts):
            return text, list(marks)
        pieces, at, added = [], 0, []
        for item, whole in zip(self.items, self.texts, strict=True):
            start = text.find(short := whole.strip(), at)
            if start < 0:
                raise BadRow(MOVED.format(name=item.media.name))
            pieces += [text[at:start], whole]
            at = start + len(short)
            before = len(whole) - len(whole.lstrip())
            added += [(start, before), (at, len(whole) - len(short) - before)]
        moved = [mark + sum(count for place, count in added if place < mark) for mark in marks]
        return "".join([*pieces, text[at:]]), moved

    def check_counts(self) -> None:
        """Check that each column has as many items as the row has tags. Call it after the last `write`."""
        for name in self.notation.modalities:
            places, given = self.taken[name], len(self.columns.get(name, ()))
            if places != given:
                hint = "" if given else f"; a <{name}> that is only text belongs into a part of type text"
                raise BadRow(f"{places} places for media (<{name}>), but {given} items in `{name}s`{hint}")


def read_column(row: Row, name: str) -> list[Any] | None:
    """Return the items of a modality in a row, from the column `NAMEs` or `NAME`. None if the row has neither."""
    many, one = row.get(f"{name}s"), row.get(name)
    if many is not None:
        return many if isinstance(many, list) else [many]
    if isinstance(one, list) and all(isinstance(value, str | bytes | Mapping) for value in one):
        return one
    return None if one is None else [one]


def read_value(value: Any, find: Find) -> tuple[Path | bytes | Any, dict[str, Any]]:
    """Return the content of an item (a path, encoded bytes, or plain values), and its options.

    Args:
        value: A string, bytes, plain values, a list of those, or an object with a key of `ENCODED` or `NAMED`. Other
            keys of such an object are options.
        find: Returns the media files that the row refers to.

    Raises:
        BadMedia: If the value is empty or cannot be read.
    """
    options: dict[str, Any] = {}
    if isinstance(value, Mapping):
        value = {key: part for key, part in value.items() if part is not None}
        # {"url": ...}, {"data": ..., "format": ...}, {"bytes": ..., "path": ...}. Objects with lists are plain values.
        pointer = next((key for key in ENCODED + NAMED if isinstance(value.get(key), str | bytes)), None)
        if pointer and all(isinstance(part, str | bytes | float | int) for part in value.values()):
            options = {key: part for key, part in value.items() if key not in ENCODED + NAMED}
            value = value[pointer]
            if pointer in ENCODED and isinstance(value, str):
                value = decode_base64(value)
    if value is None or (isinstance(value, str | bytes | list | dict) and not value):
        raise BadMedia("it is empty")
    if isinstance(value, str):
        value = read_string(value, find)
    elif isinstance(value, list) and all(isinstance(part, str | bytes | Mapping) for part in value):
        value = [read_value(part, find)[0] for part in value]
    return value, options


def read_string(value: str, find: Find) -> Path | bytes:
    """Return the path or bytes that a string stands for: a data URL, a file URL, a path, or base64."""
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        return decode_base64(body) if head.endswith(";base64") else unquote_to_bytes(body)
    if value.startswith("file://"):
        return find(unquote(value.removeprefix("file://").removeprefix("localhost")))
    if is_address(value):
        raise BadMedia(f"{value[:256]} is on the network, which training does not read from; download it beforehand")
    if len(value) > PATH_MAX:
        return decode_base64(value)
    try:
        return find(value)
    except BadMedia:
        # Base64 may look like a path, for example if it begins with a slash. Media are at least 64 characters long.
        if len(value) >= 64 and len(value) % 4 == 0 and BASE64.fullmatch(value):
            return decode_base64(value)
        raise


def decode_base64(text: str) -> bytes:
    """Decode base64, ignoring white space. Raises `BadMedia` if it is not valid."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise BadMedia(f"{text[:32]}... is not valid base64: {error}") from None


def seed_of(*key: int) -> int:
    """Return a 64-bit seed from a hash of the key, which is the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
