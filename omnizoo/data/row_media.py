"""The media of a row: from what its author wrote (parts, tags and columns, paths, bytes, numbers) to measured items.

Which modalities there are is the model's to say. A modality's name is its content type, `<NAME>` its tag in a text and
`NAMEs` the column that tags take items from.
"""

import base64
import binascii
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from omnizoo.data.row_fields import Fields, of_part
from omnizoo.data.rows import BadRow, Row
from omnizoo.modalities.base import Decoder, Encoder, Follower, Inside, Item, Modality, Port
from omnizoo.modalities.item import WELL_KNOWN, BadMedia, Media

Find = Callable[[str], Path | bytes]  # the file, or the bytes, that a row calls by a name

ENCODED, NAMED = ("bytes", "data", "base64"), ("url", "path")  # keys of an object that says where an item is
DESCRIBES = ("format", "mime_type")  # keys that say what the bytes are, which the bytes say themselves
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MOVED = "the chat template leaves out or changes the place of {name}"
PATH_MAX = 4096  # characters; a longer string is no path


class Notation:
    """How media are written: content types and tags in rows, marks among the text that is tokenised."""

    def __init__(self, modalities: Mapping[str, Modality], fields: Fields) -> None:
        self.modalities, self.fields = modalities, fields
        self.types = {type: name for name in modalities for type in (name, f"{name}_url", f"input_{name}")}
        marks = {
            mark for m in modalities.values() for mark in (m.begin, m.placeholder, m.end, m.last, *m.marks) if mark
        }
        self.mark = re.compile("|".join(map(re.escape, sorted(marks))) or "(?!)")  # (?!) never matches
        self.tag = re.compile(f"<({'|'.join(map(re.escape, modalities)) or '(?!)'})>")
        # Tags that other models read, where a place for media would be: where a line or the text begins, or at its end.
        foreign = [name for name in WELL_KNOWN if name not in modalities and f"<{name}>" not in fields.names]
        names = "|".join(foreign) or "(?!)"
        self.stray = re.compile(rf"^[ \t]*<({names})>|<({names})>\s*\Z", re.MULTILINE)

    def written(self, name: str, run: str | int | Inside) -> str:
        """A run of an item of modality `name`, before its places are counted out."""
        if isinstance(run, str):
            return run
        return self.modalities[run.modality if isinstance(run, Inside) else name].placeholder


class RowMedia:
    """Writes the contents of one row as text to be tokenised, and collects the media in them, in order."""

    def __init__(self, notation: Notation, row: Row, find: Find, key: tuple[int, ...], is_chat: bool = True) -> None:
        self.notation, self.find, self.key, self.is_chat = notation, find, key, is_chat
        self.columns = {name: column for name in notation.modalities if (column := read_column(row, name)) is not None}
        self.taken: Counter[str] = Counter()  # from each column; more than it has, if tags ask for more
        self.items: list[Item] = []  # their spans are not known yet
        self.texts: list[str] = []  # what stands for each: begin, text and placeholders, end; of followers nothing
        self.of_prompt: int | None = None  # items before the answer of a preference; None: it has not begun
        self.answers = 0  # messages of the assistant so far
        self.role: str | None = None  # of the message that is being written

    def begin_answer(self, find: Find) -> None:
        """What is written from here on is an answer that is compared with others; `find` opens what it names."""
        self.find, self.of_prompt = find, len(self.items)

    def begin(self, role: str) -> None:
        """What is written next is the content of a message of `role`."""
        self.role = role
        self.answers += role == "assistant"

    def write(self, content: Any, is_learnt: bool, what: str) -> str:
        """A string, in which tags stand for items, or a list of parts. `what` names it in errors."""
        if isinstance(content, str):
            if "<" in content:
                self._refuse_strays(content, what)
            pieces = self.notation.tag.split(content)  # every other one is the name in a tag
            return "".join(self._item(p, None, {}, is_learnt) if i % 2 else self.text(p) for i, p in enumerate(pieces))
        if not isinstance(content, list):
            raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
        return "".join(self.part(part, is_learnt, f"part {i} of {what}") for i, part in enumerate(content))

    def text(self, text: str) -> str:
        if mark := self.notation.mark.search(text):
            raise BadRow(f"its text contains {mark[0]!r}, which would be taken for media")
        return text

    def _refuse_strays(self, content: str, what: str) -> None:
        """A tag of a modality that this model does not have. With its end tag it is markup, and just text."""
        for match in self.notation.stray.finditer(content):
            name = match[1] or match[2]
            if f"</{name}>" not in content:
                known = ", ".join(self.notation.modalities) or "none"
                raise BadRow(
                    f"{what} has a <{name}>, which nothing reads: of media, this model reads {known}; if it is only "
                    f"text, put it into a part of type text, or '<{name}>' into data.ignore"
                )

    def part(self, part: Any, is_learnt: bool, what: str) -> str:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRow(f"{what} is not an object with a `type`")
        kind = part["type"]
        # columnar files give every part every key; what is None was not there
        given = {key: value for key, value in part.items() if key != "type" and value is not None}
        if kind == "text":
            if not isinstance(given.get("text"), str):
                raise BadRow(f"`text` of {what} is {type(given.get('text')).__name__}, not a string")
            if unread := of_part(given, ("text",), self.notation.fields):
                raise BadRow(self.notation.fields.unread(unread, f" of {what}"))
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
        # without such a key, the part itself may say where the item is
        value = given.pop(key) if key else {key: given.pop(key) for key in ENCODED + NAMED if key in given} or None
        given = {key: option for key, option in given.items() if not self.notation.fields.ignores(key)}
        return self._item(name, value, given, is_learnt)

    def _item(self, name: str, value: Any, options: dict[str, Any], is_learnt: bool) -> str:
        """An item as text; without a value, it is the next one of its column."""
        if value is None:
            if self.of_prompt is not None:
                example = json.dumps({"type": name, name: "..."})
                raise BadRow(
                    f"an answer of a preference has a <{name}>, but `{name}s` is for media of its prompt; write it as "
                    f"a part of the answer: {example}"
                )
            column, at = self.columns.get(name, []), self.taken[name]
            self.taken[name] += 1
            if at >= len(column):
                return ""  # `check_counts` tells how many there are
            value = column[at]
        modality = self.notation.modalities[name]
        label = f"{name} (item {len(self.items)})"
        if modality.follower is not None and modality.encoder is None and self.role != "assistant":
            where = f"a message of {self.role!r}" if self.role else "a plain text"
            known = ", ".join(["text", *(name for name, m in self.notation.modalities.items() if m.encoder)])
            raise BadRow(
                f"{label} is in {where}: it is what the model says, and so belongs to a message of the assistant; what "
                f"the model is to read is one of {known}"
            )
        module: Encoder | Decoder | Follower | None
        module, is_target = modality.encoder, False
        if is_learnt or module is None:
            made = modality.decoder or modality.follower
            module, is_target = made or module, is_learnt and made is not None
        assert module is not None, f"modality {name} has no module"
        if self.of_prompt is not None and is_target and isinstance(module, Follower):
            raise BadRow(f"{label} is in an answer of a preference, which is judged by its text; leave it out")
        if self.of_prompt is not None and is_target and isinstance(module, Decoder) and not module.has_likelihood():
            raise BadRow(f"{label} is in an answer, which is judged by how likely it is; but {module.not_likely}")
        try:
            value, found = read_value(value, self.find)
            options = found | options
            media = Media(name, value, options, seed_of(*self.key, len(self.items)))
            label = media.name
            if module.item_options is not None:
                unread = of_part(options, {*module.item_options, *DESCRIBES}, self.notation.fields)
                if unread:
                    raise BadRow(self.notation.fields.unread(unread, f" of {label}"))
            size = module.measure(media)
        except BadMedia as bad:
            raise BadRow(str(bad) if label in str(bad) else f"{label}: {bad}") from None
        if isinstance(module, Follower):
            if is_target:  # a follower does not see what was said before
                answer = self.answers - 1
                if any(item.answer == answer and item.port.modality == name for item in self.items):
                    raise BadRow(f"{label}: the assistant's message has a {name} already; give one per message")
                self.items.append(Item(Port(name, "follower"), size, (), is_target, media, answer=answer))
                self.texts.append("")
            return ""
        runs = size.layout or (size.places,)
        assert sum(run for run in runs if isinstance(run, int)) == size.places, f"{name}: {size}"
        if not size.places:
            raise BadRow(f"{label} takes no place among the tokens")
        inner = "".join(self.notation.written(name, run) for run in runs)
        port = Port(name, "decoder" if module is modality.decoder else "encoder")
        self.items.append(Item(port, size, (), is_target, media))
        self.texts.append(modality.begin + inner + modality.end)
        written = self.texts[-1].strip()  # a chat template may trim contents: see `widen`
        number = sum(item.port.modality == name for item in self.items)
        return modality.in_chat.format(item=written, number=number, before=number - 1) if self.is_chat else written

    def widen(self, text: str, marks: Sequence[int] = ()) -> tuple[str, list[int]]:
        """What a template made of the contents, with the white space around items back in its place; and where places
        in it (`marks`) are then."""
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
        """To be called when all is written."""
        for name in self.notation.modalities:
            places, given = self.taken[name], len(self.columns.get(name, ()))
            if places != given:
                hint = "" if given else f"; a <{name}> that is only text belongs into a part of type text"
                raise BadRow(f"{places} places for media (<{name}>), but {given} items in `{name}s`{hint}")


def read_column(row: Row, name: str) -> list[Any] | None:
    """The items of a row by the name of their modality: a list under its plural, or one under its name itself."""
    many, one = row.get(f"{name}s"), row.get(name)
    if many is not None:
        return many if isinstance(many, list) else [many]
    if isinstance(one, list) and all(isinstance(value, str | bytes | Mapping) for value in one):
        return one
    return None if one is None else [one]


def read_value(value: Any, find: Find) -> tuple[Path | bytes | Any, dict[str, Any]]:
    """A path, encoded bytes or plain values; and what else an object that says where they are has to say."""
    options: dict[str, Any] = {}
    if isinstance(value, Mapping):
        value = {key: part for key, part in value.items() if part is not None}
        # {"url": ...}, {"data": ..., "format": ...}, {"bytes": ..., "path": ...}; one with lists is the values itself
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
    """A data URL, a file URL, a path, or bare base64."""
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        return decode_base64(body) if head.endswith(";base64") else unquote_to_bytes(body)
    if value.startswith("file://"):
        return find(unquote(value.removeprefix("file://").removeprefix("localhost")))
    if ADDRESS.match(value):
        raise BadMedia(f"{value[:256]} is on the network, which training does not read from; download it beforehand")
    if len(value) > PATH_MAX:
        return decode_base64(value)
    try:
        return find(value)
    except BadMedia:
        # base64 of a medium may well begin with a slash, and is never this short
        if len(value) >= 64 and len(value) % 4 == 0 and BASE64.fullmatch(value):
            return decode_base64(value)
        raise


def decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"{text[:32]}... is not valid base64: {error}") from None


def seed_of(*key: int) -> int:
    """A number that is the same everywhere, always, and unrelated to that of any other key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
