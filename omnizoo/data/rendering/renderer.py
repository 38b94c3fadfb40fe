"""Render a row to token ids, labels, loss weights, and media items with their spans.

The chat template of the tokenizer renders chat rows, and the whole text is tokenized once. The characters that are
targets are found by rendering variants of the conversation, never by searching for the contents in the text. The text
of a media item has one placeholder for each run of placeholder tokens, which is repeated after tokenization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.join_responses import join_responses
from omnizoo.data.rendering.placeholders import TokenizedText, follow, place, tokens_of_spans
from omnizoo.data.rendering.template_conventions import Conventions
from omnizoo.data.row import CONVERSATION, BadRow, Row
from omnizoo.data.rows.media import Find, MediaNotation, RowMedia
from omnizoo.data.rows.messages import Message, read_list, read_messages, read_weight
from omnizoo.data.rows.preferences import ResponseRow, mismatched_sides, sides_of
from omnizoo.data.rows.schemas import NOTHING_SAID, ParsedRow, SourceSchema, hint, parse_row, with_json
from omnizoo.data.rows.speakers import write_turns
from omnizoo.data.rows.unused_fields import Pairs, RowFields
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.base import Modality
from omnizoo.modalities.item import Ids, MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.models.media.media_model import Positions, SpeakerFormat

HERE = MediaFolder(Path(), None)


@dataclass(frozen=True)
class Question:
    """A row as a prompt for generation: everything before its last response, and that response."""

    prompt: RenderedRow
    shown: str  # the prompt as readable text
    expected: str | None  # text of the response; None if the row has none


class Renderer:
    """Renders rows to tokens, for one tokenizer and the modalities of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        append_eos: bool,
        modalities: Mapping[str, Modality] | None = None,
        positions: Positions | None = None,
        seed: int = 0,
        ignore: Sequence[str] = (),
        reserved: Sequence[int] = (),
        pairs: Pairs = "refused",
        singles: bool = False,
        shapes: Sequence[SourceSchema] = (),
        learns_answers: bool = True,
        turns: SpeakerFormat | None = None,
    ) -> None:
        """Build a renderer.

        Args:
            tokenizer: A fast tokenizer.
            append_eos: Whether plain texts end with the end-of-sequence token.
            modalities: The modalities of the model by name.
            positions: Computes the position ids of models whose positions depend on media.
            seed: Seed of the random numbers of media items.
            ignore: Names and patterns of fields that may be dropped.
            reserved: Ids of placeholder tokens for media that this run does not provide. They must not occur in texts.
            pairs: Whether preference pairs are refused, allowed or required.
            singles: Whether labeled responses are accepted.
            shapes: Format settings of each source.
            learns_answers: Whether decoder losses train on desirable responses of preferences.
            turns: The format of turns for a model that has speakers and generates no text.

        Raises:
            UserError: If the tokenizer is slow, or lacks a special token of a modality.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path} is a slow one ({type(tokenizer).__name__}): it cannot tell which "
                "characters a token comes from; convert it to a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.append_eos = tokenizer, append_eos
        # Call the Rust tokenizer directly: it takes half the time of the wrapper in transformers.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

        modalities = modalities or {}
        self.fields = RowFields(modalities, ignore, pairs, singles)
        self.notation, self.positions, self.seed = MediaNotation(modalities, self.fields), positions, seed
        self.learns_answers, self.turns = learns_answers, turns
        self.placeholders, self.reserved = self._check_marks(), list(reserved)
        for modality in modalities.values():
            if modality.follower is not None:
                modality.follower.read_with(tokenizer)
        self.conventions: dict[str, Conventions] = {}  # by source of the chat template
        self.shapes = shapes
        self.read = [name for name, modality in modalities.items() if modality.encoder is not None]
        self.produced = [name for name, modality in modalities.items() if modality.decoder is not None]

    def _check_marks(self) -> list[int]:
        """Check that all marks are special tokens, and return the ids of the placeholder tokens."""
        modalities, added = self.notation.modalities, self.tokenizer.get_added_vocab()
        for name, modality in modalities.items():
            if modality.follower is not None and modality.encoder is None:
                continue  # it has no tokens in the sequence
            for mark in (
                modality.placeholder,
                *modality.marks,
                *filter(None, (modality.begin, modality.end, modality.last)),
            ):
                if mark not in added:
                    raise UserError(
                        f"{mark!r}, which marks {name} items, is not a special token of tokenizer "
                        f"{self.tokenizer.name_or_path}; add it there, or name another one"
                    )
        self.last = {name: added[modality.last] for name, modality in modalities.items() if modality.last}
        return sorted({added[modality.placeholder] for modality in modalities.values() if modality.placeholder})

    def render(
        self,
        row: Row,
        key: tuple[int, int, int] = (0, 0, 0),
        find: Find = HERE.find,
        other: Row | None = None,
        find_other: Find = HERE.find,
    ) -> RenderedRow:
        """Render a row for training.

        Args:
            row: The row.
            key: Source, epoch and row number, from which the random seeds of media items are derived.
            find: Returns the media files that the row refers to.
            other: A row whose responses also follow the prompt of this row, for the KTO baseline.
            find_other: Returns the media files that `other` refers to.

        Raises:
            BadRow: If the row cannot be used.
        """
        shape, given = self.shape(key[0]), self.fields.given(row)
        if self.fields.has_preference(given):
            given = with_json(given, shape, self.fields.modalities)
            sides = [(side, find) for side in sides_of(given, self.fields.singles)]
            if other is not None:
                there = with_json(self.fields.given(other), shape, self.fields.modalities)
                if not self.fields.has_preference(there):
                    raise BadRow("the other row has no answers")
                sides += [(side, find_other) for side in mismatched_sides(given, there)]
            rendered = [(side.role, self._render_one(side, key, find, find_answer)) for side, find_answer in sides]
            return join_responses(rendered, self.learns_answers)
        taken = self._conversation(row, given, shape)
        rendered_row = self._render_one(ResponseRow("", taken.row, taken.prompt), key, find, find)
        return replace(rendered_row, row_schema=taken.format)

    def format_of(self, row: Row, source: int) -> tuple[str, str]:
        """Return the name of the format of a row and the reason for the match; two empty strings if no rule matches.

        Raises:
            BadRow: If several rules match.
        """
        given = self.fields.given(row)
        if self.fields.has_preference(given):
            return "preference", "a loss of the run reads its answers"
        taken = self.taken_as(row, given, self.shape(source))
        return (taken.format, taken.why) if taken else ("", "")

    def shape(self, source: int) -> SourceSchema:
        """Return the format settings of a source, by its index."""
        return self.shapes[source] if source < len(self.shapes) else NOTHING_SAID

    def _conversation(self, row: Row, given: Row, shape: SourceSchema) -> ParsedRow:
        """Return a row without preferences, converted from its format. Raises `BadRow` if no format matches."""
        taken = self.taken_as(row, given, shape)
        if taken is None:
            self.fields.check_conversation(given, row, hint(given, shape))
        assert taken is not None, "without a conversation, a row is bad"
        self.fields.check_conversation(taken.row, row)
        return taken

    def taken_as(self, row: Row, given: Row, shape: SourceSchema) -> ParsedRow | None:
        """Detect the format of a row without preferences, and convert the row. Return None if no format matches.

        Args:
            row: The whole row.
            given: The fields that are neither empty nor ignored.
            shape: Format settings of the source.
        """
        if shape.format == "preference":
            shape = replace(shape, format=None)  # then `check_conversation` reports what is missing
        offered = {name: value for name, value in row.items() if name not in self.fields.names}
        taken = parse_row(offered, given, self.read, self.produced, shape)
        # An empty conversation has its own error message.
        if taken is None and any(name in given for name in CONVERSATION):
            return ParsedRow("", "", given)
        return taken

    def _render_one(
        self, response: ResponseRow, key: tuple[int, int, int], find: Find, find_answer: Find
    ) -> RenderedRow:
        """Render a row without preferences, or one response with its prompt.

        Args:
            response: The row with a single response.
            key: Source, epoch and row number.
            find: Returns the media files that the prompt refers to.
            find_answer: Returns the media files that the response refers to.
        """
        given = response.row
        field = next(name for name in CONVERSATION if name in given)
        is_text = field == "text"
        media = RowMedia(self.notation, given, find, (self.seed, *key), is_chat=not is_text)
        if self.turns is not None:
            if response.role:
                raise BadRow("a preference is judged by text, which this model does not write")
            tokens = self._tokens_of_turns(write_turns(given, field, self.turns, media, self.special_tokens))
        elif is_text:
            tokens = self._render_text(given, media, response.prompt)
        else:
            tokens = self._render_chat(response, field, media, find_answer)
        if self.reserved and len(found := np.intersect1d(tokens.ids, self.reserved)):
            token = self.tokenizer.convert_ids_to_tokens(int(found[0]))
            raise BadRow(f"its text contains {token!r}, which stands for media that nothing feeds to this model")
        if "weight" in given:
            weight = read_weight(given["weight"], "its `weight`")
            if not weight:
                raise BadRow("no token to learn: its `weight` is 0")
            tokens = replace(tokens, weights=tokens.weights * np.float32(weight))
        ids, weights, items, extents = place(tokens, media, self.placeholders, self.last)
        items = follow(ids, items, media)
        targets = weights > 0
        if not targets[1:].any() and not any(item.is_target for item in items):
            raise BadRow("no token to learn: the loss is on none of its tokens, or on the first one only")
        is_plain = bool((weights[targets] == 1).all())
        columns = make_columns(
            input_ids=ids,
            labels=np.where(targets, ids, IGNORE_INDEX),
            position_ids=self._positions(ids, items),
            loss_weights=None if is_plain else weights,
        )
        of_prompt = len(items) if media.of_prompt is None else media.of_prompt
        is_prose = is_text and not response.prompt
        return RenderedRow(columns, items, is_prose=is_prose, item_spans=extents, num_prompt_items=of_prompt)

    def prompt(self, value: list[Message] | str, find: Find = HERE.find) -> RenderedRow:
        """Render a prompt for generation.

        Args:
            value: The messages of a conversation. A string is one user message or, without a chat template, a text to
                continue.
            find: Returns the media files that the messages refer to.

        Raises:
            BadRow: If the messages cannot be rendered.
        """
        media = RowMedia(self.notation, {}, find, (self.seed, 0, 0, 0))
        if self.turns is not None:
            turn = [{"role": self.turns.default, "content": value}] if isinstance(value, str) else value
            text = write_turns({"messages": turn}, "messages", self.turns, media, self.special_tokens, asks=True)
            return self._prompt(text, media)
        if isinstance(value, str) and not self.tokenizer.chat_template:
            return self._prompt(media.text(value), media, add_special_tokens=True)
        conversation = [{"role": "user", "content": value}] if isinstance(value, str) else value
        template, messages = self._read_chat({"messages": conversation}, "messages")
        self._write(messages, media)
        return self._chat_prompt(template, messages, media)

    def question(self, row: Row, find: Find = HERE.find, shape: SourceSchema = NOTHING_SAID) -> Question:
        """Split a row into a prompt for generation and the expected response.

        The response consists of the last messages of the assistant or, for a plain text, of its second half.

        Args:
            row: The row.
            find: Returns the media files that the row refers to.
            shape: Format settings of the source.

        Raises:
            BadRow: If the row cannot be used as a prompt, for example because it is a preference.
        """
        given = self.fields.given(row)
        if self.fields.has_preference(given):
            raise BadRow("a preference has several answers: it is not put to the model as a question")
        taken = self._conversation(row, given, shape)
        given = taken.row
        field = next(name for name in CONVERSATION if name in given)
        media = RowMedia(self.notation, given, find, (self.seed, 0, 0, 0))
        if self.turns is not None:
            text = write_turns(given, field, self.turns, media, self.special_tokens, asks=True)
            return Question(self._prompt(text, media), transcript(given[field]), None)
        if field == "text":
            return self._begun_text(given, media, taken.prompt)
        template, messages = self._read_chat(given, field)
        count = len(messages)
        while count and messages[count - 1]["role"] == "assistant":
            count -= 1
        if not count:
            raise BadRow("nobody asks anything: all of its messages are the assistant's")
        asked, answers = messages[:count], messages[count:]
        shown = transcript(asked)
        expected = "\n".join(plain(message.get("content")) for message in answers) if answers else None
        for message in messages:
            message.pop("loss")
        for number, message in enumerate(messages):
            if number == count:
                items, texts = list(media.items), list(media.texts)
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), False, f"`content` of message {number}")
        media.check_counts()  # of the whole row: columns also contain the items of the response
        if answers:
            media.items, media.texts = items, texts
        return Question(self._chat_prompt(template, asked, media), shown, expected)

    def _begun_text(self, given: Row, media: RowMedia, prompt: str) -> Question:
        """Split a plain text into its prompt, or else its first half, and the rest."""
        content = given["text"]
        if not isinstance(content, str) or media.columns or len(words := content.split(" ")) < 2:
            raise BadRow("a text with media, or of one word, has no first half to go on from")
        first = prompt or " ".join(words[: len(words) // 2])
        begun = self._prompt(media.text(first), media, add_special_tokens=True)
        return Question(begun, first, content.removeprefix(first))

    def _chat_prompt(self, template: ChatTemplate, messages: list[Message], media: RowMedia) -> RenderedRow:
        """Render messages as a prompt that ends with the header of a response."""
        return self._prompt(media.widen(template.render(messages, prompt=True))[0], media)

    def _prompt(self, text: str, media: RowMedia, add_special_tokens: bool = False) -> RenderedRow:
        """Tokenize a prompt and expand its placeholder tokens. The result has no labels."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        everywhere = np.ones(len(encoding), np.float32)
        tokens = TokenizedText(text, np.array(encoding.ids, np.int32), encoding.offsets, everywhere)
        ids, _, items, _ = place(tokens, media, self.placeholders, self.last)
        items = tuple(item for item in items if item.answer is None)  # followers do not use earlier messages
        return RenderedRow(make_columns(input_ids=ids, position_ids=self._positions(ids, items)), items)

    def _positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[Any] | None:
        """Return the position ids `[rows, tokens]`, or None if positions just count tokens."""
        if self.positions is None:
            return None
        try:
            positions = self.positions(ids, items)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None
        assert positions.shape[1:] == ids.shape, "one column of positions for every token"
        return positions

    def end_of_turn(self) -> list[int]:
        """Return the id of the token that ends a response, in a list that is empty if there is none.

        It is the first added token after the response (`<|im_end|>`, `<|eot_id|>`, `</s>`) in a conversation that the
        chat template renders. Tokenizers often do not name it. In some templates a turn ends only where the next one
        begins, so a conversation with a further message is tried as well.
        """
        if not self.tokenizer.chat_template:
            return []
        answer, added = "answer0x", set(self.tokenizer.added_tokens_decoder)
        turns: list[Message] = [
            {"role": role, "content": answer if role == "assistant" else "question"}
            for role in ("user", "assistant", "user")
        ]
        for conversation in (turns[:2], turns):
            try:
                text = self._template(None).render(conversation)
            except BadRow:
                continue
            encoding = self.backend.encode(text, add_special_tokens=False)
            after = text.rfind(answer) + len(answer)
            tokens = zip(encoding.ids, encoding.offsets, strict=True)
            ends = [token for token, (start, _) in tokens if start >= after and token in added]
            if answer in text and ends:
                return ends[:1]
        return []

    def _template(self, tools: list[Any] | None) -> ChatTemplate:
        """Return the chat template for some tools. Raises `UserError` if the tokenizer has none."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"tokenizer {self.tokenizer.name_or_path} has no chat template, which rows with messages need; "
                "add a chat_template.jinja to its folder"
            )
        return ChatTemplate(self.tokenizer.get_chat_template(tools=tools), tools, self.special_tokens)

    def _conventions(self, template: ChatTemplate) -> Conventions:
        """Return the conventions of a template, which are cached for all rows."""
        if template.source not in self.conventions:
            self.conventions[template.source] = Conventions(template.source, self.special_tokens)
        return self.conventions[template.source]

    def _read_chat(self, row: Row, field: str) -> tuple[ChatTemplate, list[Message]]:
        """Return the chat template with the tools of a row, and the messages of the row."""
        tools = read_list(row["tools"], "`tools`") if "tools" in row else None
        template = self._template(tools or None)
        return template, read_messages(row[field], field, row.get("system"), self._conventions(template), self.fields)

    def _write(
        self, messages: list[Message], media: RowMedia, find_answer: Find = HERE.find, num_answer: int = 0
    ) -> list[float]:
        """Convert the contents of messages to text, in place.

        Args:
            messages: The messages, which lose their `loss` key.
            media: Collects the media items.
            find_answer: Returns the media files that the response of a preference refers to.
            num_answer: Number of last messages that form the response of a preference; 0 without preferences.

        Returns:
            The loss weight of each message; 0 if it is not trained on.
        """
        wanted = [message.pop("loss") for message in messages]
        begins = len(messages) - num_answer
        for number, (message, loss) in enumerate(zip(messages, wanted, strict=True)):
            if number == begins:
                media.begin_answer(find_answer)
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), loss > 0, f"`content` of message {number}")
        media.check_counts()
        return wanted

    def _render_text(self, row: Row, media: RowMedia, prompt: str) -> TokenizedText:
        """Tokenize the `text` of a row. All tokens are targets, except those of `prompt`, with which it begins."""
        content = row["text"]
        # In a row without media columns, tags such as <image> are plain text.
        is_plain = isinstance(content, str) and not media.columns
        text = media.text(content) if is_plain else media.write(content, True, "`text`")
        media.check_counts()
        if not text:
            raise BadRow("`text` is empty")
        text = media.widen(text)[0]
        if prompt and media.columns:
            raise BadRow("a preference pair of plain texts cannot have media; write it as messages")
        encoding = self.backend.encode(text)
        ids, offsets = encoding.ids, encoding.offsets if media.items else []  # listing the offsets is slow
        weights = np.ones(len(ids), np.float32)
        if prompt:
            ends = np.maximum.accumulate([end for _, end in encoding.offsets])  # added special tokens have offset 0
            weights[ends <= len(prompt)] = 0
        if self.append_eos:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise UserError(f"tokenizer {self.tokenizer.name_or_path} has no eos token; set data.append_eos: false")
            if ids[-1:] != [eos]:
                ids.append(eos)
                offsets.append((len(text), len(text)))
                weights = np.append(weights, np.float32(1))
        return TokenizedText(text, np.array(ids, np.int32), offsets, weights)

    def _render_chat(self, response: ResponseRow, field: str, media: RowMedia, find_answer: Find) -> TokenizedText:
        """Tokenize the messages of a row, and check that the chat template drops none of their content."""
        template, messages = self._read_chat(response.row, field)
        conventions = self._conventions(template)
        wanted = self._write(messages, media, find_answer, response.messages)
        conventions.check_fields(messages, template.tools, self.fields)
        text, spans = template.target_spans(messages, wanted)
        conventions.check(messages, template.tools, text)
        text, marks = media.widen(text, [mark for span, _ in spans for mark in span])
        spans = [((a, b), weight) for a, b, (_, weight) in zip(marks[::2], marks[1::2], spans, strict=True)]
        encoding = self.backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets  # read once, because each access builds a new list
        weights = np.zeros(len(encoding), np.float32)
        for span, weight in spans:
            for first, last in tokens_of_spans(offsets, [span]):
                weights[first:last] = weight
        return TokenizedText(text, np.array(encoding.ids, np.int32), offsets, weights)

    def _tokens_of_turns(self, text: str) -> TokenizedText:
        """Tokenize the turns of speakers. Only placeholder tokens get a weight, because text is never a target."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        return TokenizedText(text, ids, encoding.offsets, np.isin(ids, self.placeholders).astype(np.float32))


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as readable text, one per line, each with its role."""
    return "\n".join(f"{message['role']}: {plain(message.get('content'))}" for message in messages)


def plain(content: Any) -> str:
    """Return the content of a message as readable text. Media items are shown by type, such as `[image]`."""
    if not isinstance(content, list):
        return str(content or "")
    parts = [part for part in content if isinstance(part, dict)]
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
