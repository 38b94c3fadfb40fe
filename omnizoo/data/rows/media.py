"""Find the media items of a row, read them and measure them.

A modality with the name `image` has the content type `image`, the tag `<image>` in texts, and the column `images` with
the items that the tags stand for. An item may be a path, encoded bytes or plain numbers.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, unquote_to_bytes

from omnizoo.data.row import DEFAULT_SCHEMA, BadRow, Fix, Row, SourceSchema
from omnizoo.data.rows.unused_fields import RowFields
from omnizoo.data.sources.base import RowFiles
from omnizoo.data.sources.remote import is_address
from omnizoo.modalities.base import Decoder, Encoder, Follower, LikelihoodDecoder, Modality
from omnizoo.modalities.item import MediaItem, MediaSize, NestedRun, Port
from omnizoo.modalities.media import WELL_KNOWN, BadMedia, Media, MissingMedia
from omnizoo.modalities.precomputed import StoredTargets

Find = Callable[[str], Path | bytes]  # returns a media file, or its content, by its name in a row

CONTENT_KEYS = ("bytes", "data", "base64")  # keys with the content of an item, in an object that describes it
LOCATION_KEYS = ("url", "path")  # keys with the location of an item
FORMAT_KEYS = ("format", "mime_type")  # keys that are ignored, because the format is detected from the content
AUTO = {"detail": "auto"}  # options of OpenAI's API with their default values; options with these values may be dropped
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
MOVED = "the chat template drops or moves {name}. Use a chat template that keeps media in place."
PATH_MAX = 4096  # characters; a longer string is not a path
NEVER = "(?!)"  # a pattern that never matches


class MediaNotation:
    """How media are written: with content types and tags in rows, and with special tokens in rendered text.

    Args:
        modalities: The modalities of the model, by name.
        fields: Determines which fields and tags are ignored.
    """

    def __init__(self, modalities: Mapping[str, Modality], fields: RowFields) -> None:
        self.modalities = modalities
        self.fields = fields
        self.types: dict[str, str] = {}  # the modality of each content type
        marks: set[str] = set()
        for name, modality in modalities.items():
            self.types |= dict.fromkeys((name, f"{name}_url", f"input_{name}"), name)
            marks |= {modality.begin, modality.placeholder, modality.end, modality.last, *modality.marks}
        special_tokens = sorted(filter(None, marks))
        self.special_token = re.compile("|".join(map(re.escape, special_tokens)) or NEVER)
        tags = "|".join(map(re.escape, modalities)) or NEVER
        self.tag = re.compile(f"<({tags})>")

        # Tags of well-known modalities that this model does not have. They only match where media tags usually are: at
        # the start of a line, or at the end of the text.
        missing = [name for name in WELL_KNOWN if name not in modalities]
        unknown_tags = "|".join(name for name in missing if f"<{name}>" not in fields.ignored) or NEVER
        self.unknown_tag = re.compile(rf"^[ \t]*<({unknown_tags})>|<({unknown_tags})>\s*\Z", re.MULTILINE)

    def text_of_run(self, name: str, run: str | int | NestedRun) -> str:
        """Return the text of one run in an item. A run of placeholder tokens is a single placeholder in the text.

        Args:
            name: Name of the modality.
            run: One entry of `MediaSize.layout`.
        """
        if isinstance(run, str):
            return run
        modality = run.modality if isinstance(run, NestedRun) else name
        return self.modalities[modality].placeholder


class RowMedia:
    """Converts the contents of one row to text for the tokenizer, and collects their media items in order.

    Args:
        notation: Tags and special tokens of the modalities.
        row: The row. Its media columns contain the items that tags stand for.
        find: Returns the media files that the row refers to.
        key: Seed, source, epoch and row number, from which the random seeds of items are derived.
        is_chat: Whether to write items in the notation of the chat template (`Modality.in_chat`).
        schema: Settings of the source.
    """

    def __init__(
        self,
        notation: MediaNotation,
        row: Row,
        find: Find,
        key: tuple[int, ...],
        is_chat: bool = True,
        schema: SourceSchema = DEFAULT_SCHEMA,
    ) -> None:
        self.notation = notation
        self.find = find
        self.key = key
        self.is_chat = is_chat
        self.schema = schema
        columns = {name: read_column(row, name) for name in notation.modalities}
        self.columns = {name: column for name, column in columns.items() if column is not None}
        self.num_tags: Counter[str] = Counter()  # number of tags so far, for each modality
        self.items: list[MediaItem] = []  # their spans are set after tokenization
        self.texts: list[str] = []  # text of each item, with placeholders and marks; "" for followers
        # Number of items before the response of a preference row; None until the response begins.
        self.num_prompt_items: int | None = None
        self.num_responses = 0  # number of assistant messages so far
        self.role: str | None = None  # role of the current message

    def place_untagged(self, messages: Sequence[dict[str, Any]]) -> None:
        """Add tags to the first user message, in place, for media columns without a tag in any message.

        Raises:
            BadRow: If there is such a column, and `untagged_media` of the source does not allow this.
        """
        prompts = [message for message in messages if message["role"] == "user"]
        untagged = [name for name in self._untagged(messages) if self.notation.modalities[name].encoder is not None]
        if not prompts or not untagged:
            return  # `check_counts` reports a mismatch between tags and columns
        if self.schema.untagged_media is None:
            if self.notation.modalities[untagged[0]].decoder is None:
                raise self._untagged_error(untagged[0])
            return  # the items may belong to a response, so `check_counts` reports the mismatch
        for name in reversed(untagged):
            content: Any = prompts[0].get("content") or ""
            num_items = len(self.columns[name])
            tags: Any = f"<{name}>" * num_items if isinstance(content, str) else [{"type": name}] * num_items
            prompts[0]["content"] = tags + content

    def _untagged(self, messages: Sequence[dict[str, Any]]) -> list[str]:
        """Return the modalities that have items in a column, but no tag in any message."""
        tagged: set[str] = set()
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else [content]:
                if isinstance(part, str):
                    tagged |= set(self.notation.tag.findall(part))
                elif isinstance(part, dict):
                    tagged.add(self.notation.types.get(str(part.get("type")), ""))
        return [name for name, column in self.columns.items() if column and name not in tagged]

    def _untagged_error(self, name: str) -> BadRow:
        """Return the error for a column whose items have no tags."""
        fix = Fix(f"{self.schema.key}.untagged_media", "first", f"no text has a tag <{name}>")
        return BadRow(
            f"<{name}> occurs 0 times, but `{name}s` has {len(self.columns[name])} items. Set {fix.key}: first to put "
            "them at the beginning of the first user message.",
            [fix],
        )

    def begin_response(self, find: Find) -> None:
        """Record that the response of a preference row begins.

        Args:
            find: Returns the media files that the response refers to.
        """
        self.find = find
        self.num_prompt_items = len(self.items)

    def begin(self, role: str) -> None:
        """Record that a message with this role begins."""
        self.role = role
        self.num_responses += role == "assistant"

    def write(self, content: Any, has_targets: bool, what: str) -> str:
        """Convert the content of a message to text for the tokenizer, and collect its items.

        Args:
            content: A string, in which tags stand for items, or a list of content parts.
            has_targets: Whether the content is trained on.
            what: Name of the content in error messages.

        Raises:
            BadRow: If the content cannot be read.
        """
        if isinstance(content, str):
            if "<" in content:
                self._check_unknown_tags(content, what)
            text = ""
            for i, piece in enumerate(self.notation.tag.split(content)):
                is_tag = i % 2 == 1  # `split` alternates between text and the names of tags
                text += self._item(piece, None, {}, has_targets) if is_tag else self.text(piece)
            return text
        if not isinstance(content, list):
            raise BadRow(f"{what} is {type(content).__name__}, not a string or a list of parts")
        return "".join(self.part(part, has_targets, f"part {i} of {what}") for i, part in enumerate(content))

    def text(self, text: str) -> str:
        """Return a plain text unchanged. Raises `BadRow` if it contains a special token of a modality."""
        match = self.notation.special_token.search(text)
        if match:
            raise BadRow(f"the text contains {match[0]!r}, a special token that marks media. Remove it.")
        return text

    def _check_unknown_tags(self, content: str, what: str) -> None:
        """Raise `BadRow` if a text has a tag of a modality that this model does not have.

        A tag with a matching end tag, such as `</image>`, is allowed, because it is markup.
        """
        for match in self.notation.unknown_tag.finditer(content):
            name = match[1] or match[2]
            if f"</{name}>" not in content:
                accepted = ", ".join(self.notation.modalities) or "no media"
                raise BadRow(
                    f"<{name}> in {what} is not used: this model accepts {accepted}. If it is text, move it to a part "
                    f"of type text, or add '<{name}>' to data.ignore."
                )

    def part(self, part: Any, has_targets: bool, what: str) -> str:
        """Convert one content part to text for the tokenizer, and collect its item if it is media.

        See `write` for the arguments.
        """
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRow(f"{what} is not an object with a `type`")
        kind = part["type"]
        # In columnar files, every part has the union of all keys, so a key with None counts as absent.
        keys = {key: value for key, value in part.items() if key != "type" and value is not None}
        if kind == "text":
            text = keys.get("text")
            if not isinstance(text, str):
                raise BadRow(f"`text` of {what} is {type(text).__name__}, not a string")
            self.notation.fields.check_used(keys, ("text",), what)
            return self.text(text)

        name = self.notation.types.get(kind)
        if name is None:
            self._raise_unknown_type(kind, what)
        value = self._pop_value(keys, kind, name)
        options = {key: option for key, option in keys.items() if not self.notation.fields.is_ignored(key)}
        return self._item(name, value, options, has_targets)

    def _raise_unknown_type(self, kind: str, what: str) -> NoReturn:
        """Raise the error for a content part with an unknown type."""
        known = ", ".join(["text", *self.notation.modalities])
        close = get_close_matches(kind, ["text", *self.notation.types], 1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        raise BadRow(f"{what} has the unknown type {kind!r}; known: {known}{suggestion}")

    def _pop_value(self, keys: dict[str, Any], kind: str, name: str) -> Any:
        """Remove the value of an item from its content part, and return the value; None if the part has no value.

        Args:
            keys: The content part without `type`. It is changed in place.
            kind: The type of the part.
            name: The modality of the item.
        """
        modality = self.notation.modalities[name]
        producer = modality.decoder or modality.follower
        value_keys = producer.values if producer is not None else ()
        for key in (kind, name, f"{name}_url", *value_keys):
            if key in keys:
                return keys.pop(key)
        # The part itself may also describe the item, as in {"type": "image", "path": ...}.
        content = {key: keys.pop(key) for key in CONTENT_KEYS + LOCATION_KEYS if key in keys}
        return content or None

    def _item(self, name: str, value: Any, options: dict[str, Any], has_targets: bool) -> str:
        """Collect a media item, and return the text that represents it.

        Args:
            name: The modality.
            value: The value of the item; None to use the next item of the media column.
            options: Options of the item.
            has_targets: Whether the content around the item is trained on.
        """
        if value is None:
            column, index = self._next_of_column(name)
            if index >= len(column):
                return ""  # `check_counts` reports that there are more tags than items
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
            raise BadRow(f"{media.name} has 0 placeholder tokens, so the model cannot read it. Use a larger item.")
        inner_text = "".join(self.notation.text_of_run(name, run) for run in runs)
        text = modality.begin + inner_text + modality.end
        port = Port(name, "decoder" if module is modality.decoder else "encoder")
        self.items.append(MediaItem(port, size, (), is_target, media))
        self.texts.append(text)

        stripped = text.strip()  # `widen` restores the white space after rendering, because templates may remove it
        if not self.is_chat:
            return stripped
        number = sum(item.port.modality == name for item in self.items)
        return modality.in_chat.format(item=stripped, number=number, before=number - 1)

    def _next_of_column(self, name: str) -> tuple[Sequence[Any], int]:
        """Return the media column of a modality and the index of the next item, and count a tag."""
        if self.num_prompt_items is not None:
            example = json.dumps({"type": name, name: "..."})
            raise BadRow(
                f"<{name}> is in a response of a preference row, but the items of `{name}s` belong to the prompt. "
                f"Write the item as a content part of the response: {example}"
            )
        index = self.num_tags[name]
        self.num_tags[name] += 1
        return self.columns.get(name, []), index

    def _module_of_item(self, name: str, has_targets: bool) -> tuple[Encoder | Decoder | Follower, bool]:
        """Return the module that processes the next item, and whether the item is a target.

        Raises:
            BadRow: If the model cannot process an item of this modality at this position.
        """
        modality = self.notation.modalities[name]
        label = f"{name} (item {len(self.items)})"
        if modality.follower is not None and modality.encoder is None and self.role != "assistant":
            location = f"a message of {self.role!r}" if self.role else "a plain text"
            modalities = self.notation.modalities
            encoders = [other for other in modalities if modalities[other].encoder]
            raise BadRow(
                f"{label} is in {location}, but the model generates {name} and cannot read it. Move it to a message of "
                f"the assistant; the model can read {', '.join(['text', *encoders])}."
            )
        producer = modality.decoder or modality.follower
        is_target = has_targets and producer is not None
        module: Encoder | Decoder | Follower | None = modality.encoder
        if producer is not None and (has_targets or module is None):
            module = producer
        assert module is not None, f"modality {name} has no module"
        if self.num_prompt_items is not None and is_target:
            if isinstance(module, Follower):
                raise BadRow(
                    f"{label} is in a response of a preference row, but preference losses depend on text only. Remove "
                    "it."
                )
            if not isinstance(module, Encoder | LikelihoodDecoder):
                reason = module.no_likelihood_reason
                raise BadRow(
                    f"{label} is in a response of a preference row, whose losses need likelihoods, but {reason}"
                )
        return module, is_target

    def _measure(
        self, name: str, value: Any, options: dict[str, Any], module: Encoder | Decoder | Follower
    ) -> tuple[Media, MediaSize]:
        """Read the value of an item, and measure the item.

        Args:
            name: The modality.
            value: The value in the row.
            options: Options of the item.
            module: The module that will process the item.

        Raises:
            BadRow: If the item cannot be read or measured, or has an unknown option.
        """
        label = f"{name} (item {len(self.items)})"
        stored = self._stored_targets(name, module)
        if stored is not None:
            return Media(name, stored, {}, seed_of(*self.key, len(self.items))), stored.size
        try:
            value, options_of_value = read_value(value, self.find)
            options = options_of_value | {key: part for key, part in options.items() if part != AUTO.get(key)}
            options = {key: part for key, part in options.items() if not self.notation.fields.is_ignored(key)}
            media = Media(name, value, options, seed_of(*self.key, len(self.items)))
            label = media.name
            if module.item_options is not None:
                self.notation.fields.check_used(options, {*module.item_options, *FORMAT_KEYS}, label)
            return media, module.measure(media)
        except MissingMedia as missing:
            fix = Fix(f"{self.schema.key}.media_dir", None, f"the folder that has {missing.name}", missing.name)
            hint = f". If it is in another folder, set {fix.key}"
            raise BadRow(f"{label}: {missing}{hint}", [fix]) from None
        except BadMedia as bad:
            raise BadRow(str(bad) if label in str(bad) else f"{label}: {bad}") from None

    def _stored_targets(self, name: str, module: Encoder | Decoder | Follower) -> StoredTargets | None:
        """Return the targets of the next item if they were computed before the run; otherwise None."""
        if not isinstance(self.find, RowFiles):
            return None
        stored = self.find.stored.get(len(self.items))
        if stored is not None and (stored.port.modality != name or not isinstance(module, Decoder)):
            raise BadRow(
                f"{name} (item {len(self.items)}) does not match the precomputed targets of {stored.port}. Run omnizoo "
                "data precompute with this config."
            )
        return stored

    def _add_followed(self, name: str, media: Media, size: MediaSize) -> None:
        """Collect an item that a follower generates. The sequence contains no text for it."""
        response = self.num_responses - 1
        if any(item.answer == response and item.port.modality == name for item in self.items):
            raise BadRow(f"{media.name}: the assistant message has more than one {name}. Keep one per message.")
        self.items.append(MediaItem(Port(name, "follower"), size, (), True, media, answer=response))
        self.texts.append("")

    def widen(self, text: str, marks: Sequence[int] = ()) -> tuple[str, list[int]]:
        """Restore the white space at the beginning and end of items that `write` has removed.

        Args:
            text: The output of the chat template.
            marks: Indices of characters in `text`.

        Returns:
            The text with the white space, and the indices of the same characters in it.

        Raises:
            BadRow: If the text of an item is missing.
        """
        if all(item_text == item_text.strip() for item_text in self.texts):
            return text, list(marks)
        pieces = []
        insertions = []  # (index in `text`, number of inserted characters)
        stop = 0
        for item, item_text in zip(self.items, self.texts, strict=True):
            stripped = item_text.strip()
            start = text.find(stripped, stop)
            if start < 0:
                raise BadRow(MOVED.format(name=item.media.name))
            pieces += [text[stop:start], item_text]
            stop = start + len(stripped)
            num_leading = len(item_text) - len(item_text.lstrip())
            num_trailing = len(item_text) - len(stripped) - num_leading
            insertions += [(start, num_leading), (stop, num_trailing)]

        moved_marks = []
        for mark in marks:
            moved_marks.append(mark + sum(count for index, count in insertions if index < mark))
        return "".join([*pieces, text[stop:]]), moved_marks

    def check_counts(self) -> None:
        """Check that each media column has as many items as the row has tags. Call this after the last `write`.

        Raises:
            BadRow: If the numbers differ.
        """
        for name in self.notation.modalities:
            num_tags = self.num_tags[name]
            num_items = len(self.columns.get(name, ()))
            if num_tags != num_items:
                hint = "" if num_items else f". If <{name}> is text, move it to a part of type text."
                raise BadRow(f"<{name}> occurs {num_tags} times, but `{name}s` has {num_items} items{hint}")


def read_column(row: Row, name: str) -> list[Any] | None:
    """Return the items in the media column of a modality, such as `images` or `image`; None if there is none."""
    plural = row.get(f"{name}s")
    if plural is not None:
        return plural if isinstance(plural, list) else [plural]
    singular = row.get(name)
    if isinstance(singular, list) and all(isinstance(value, str | bytes | Mapping) for value in singular):
        return singular
    return None if singular is None else [singular]


def read_value(value: Any, find: Find) -> tuple[Path | bytes | Any, dict[str, Any]]:
    """Read the value of a media item in a row.

    Args:
        value: A string, bytes, plain values, a list of such values, or an object with a key of `CONTENT_KEYS` or
            `LOCATION_KEYS`. Other keys of such an object are options.
        find: Returns the media files that the row refers to.

    Returns:
        The content of the item (a path, encoded bytes, or plain values), and its options.

    Raises:
        BadMedia: If the value is empty or cannot be read.
    """
    options: dict[str, Any] = {}
    if isinstance(value, Mapping):
        value = {key: part for key, part in value.items() if part is not None}
        # Objects such as {"url": ...} or {"data": ..., "format": ...} describe an item. An object with lists in it is a
        # plain value.
        value_keys = CONTENT_KEYS + LOCATION_KEYS
        value_key = next((key for key in value_keys if isinstance(value.get(key), str | bytes)), None)
        if value_key and all(isinstance(part, str | bytes | float | int) for part in value.values()):
            options = {key: part for key, part in value.items() if key not in value_keys and part != AUTO.get(key)}
            value = value[value_key]
            if value_key in CONTENT_KEYS and isinstance(value, str):
                value = decode_base64(value)
    if value is None or (isinstance(value, str | bytes | list | dict) and not value):
        raise BadMedia("the media item is empty")
    if isinstance(value, str):
        value = read_string(value, find)
    elif isinstance(value, list) and all(isinstance(part, str | bytes | Mapping) for part in value):
        value = [read_value(part, find)[0] for part in value]
    return value, options


def read_string(value: str, find: Find) -> Path | bytes:
    """Return the path or the content that a string refers to. It may be a data URL, a file URL, a path or base64.

    Raises:
        BadMedia: If the string is a network address, or neither a file nor valid base64.
    """
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        return decode_base64(body) if head.endswith(";base64") else unquote_to_bytes(body)
    if value.startswith("file://"):
        return find(unquote(value.removeprefix("file://").removeprefix("localhost")))
    if is_address(value):
        raise BadMedia(f"{value[:256]} is a network address, and training reads local files only. Download it first.")
    if len(value) > PATH_MAX:
        return decode_base64(value)
    try:
        return find(value)
    except BadMedia:
        # Base64 may look like a path, for example if it begins with a slash. Encoded media have at least 64 characters.
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
    """Return a 64-bit seed that is computed from `key`. It is the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
