"""Render a row to token ids, labels, loss weights, and media items with their spans.

A chat row is rendered with the chat template of the tokenizer, and the whole text is tokenized once. The characters
that are targets are found by rendering variants of the conversation, never by searching for the contents in the text.
In the text, a run of placeholder tokens of a media item is a single placeholder; it is repeated after tokenization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ScoreHead
from omnizoo.data.rendering.chat_template import ChatTemplate
from omnizoo.data.rendering.join_responses import join_responses
from omnizoo.data.rendering.placeholders import TokenizedText, locate_followed, place, tokens_of_spans
from omnizoo.data.rendering.response_spans import check_calls, target_spans
from omnizoo.data.rendering.template_conventions import Conventions
from omnizoo.data.rendering.thinking import Thinking, TurnChoice, keep_thoughts
from omnizoo.data.rendering.token_rows import TokenRowRenderer
from omnizoo.data.row import CONVERSATION, DEFAULT_SCHEMA, BadRow, Row, SourceSchema
from omnizoo.data.rows.labels import LabelReader, read_margin
from omnizoo.data.rows.media import Find, MediaNotation, RowMedia
from omnizoo.data.rows.messages import Message, read_list, read_messages, read_weight
from omnizoo.data.rows.preferences import ResponseRow, mismatched_rows, response_rows
from omnizoo.data.rows.schemas import ParsedRow, columns_fixes, parse_row, prompt_fixes, with_json
from omnizoo.data.rows.speakers import write_turns
from omnizoo.data.rows.unused_fields import PreferenceRows, RowFields
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.data.token_fields import CLASSES, IGNORE_INDEX, MARGIN, make_columns
from omnizoo.modalities.base import Modality
from omnizoo.modalities.item import Ids, MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.models.media.media_model import Positions, SpeakerFormat

HERE = MediaFolder(Path(), None)  # finds media files relative to the working directory
DEFAULT_THINKING = Thinking()


@dataclass(frozen=True)
class Question:
    """A row that was split into a prompt for generation and the expected response."""

    prompt: RenderedRow  # everything before the last response
    shown: str  # the prompt as readable text
    expected: str | None  # the last response as rendered, without special tokens; None if there is none
    expected_items: tuple[MediaItem, ...] = ()  # media in the last response that decoders generate


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
        preferences: PreferenceRows = "refused",
        labeled_responses: bool = False,
        schemas: Sequence[SourceSchema] = (),
        trains_decoders: bool = True,
        turns: SpeakerFormat | None = None,
        thinking: Thinking = DEFAULT_THINKING,
        score_head: ScoreHead | None = None,
    ) -> None:
        """Build a renderer.

        Args:
            tokenizer: A fast tokenizer.
            append_eos: Whether plain texts end with the end-of-sequence token.
            modalities: The modalities of the model by name.
            positions: Computes the position ids, for models whose positions depend on media; None if the positions are
                0, 1, 2, ...
            seed: Seed of the random numbers of media items.
            ignore: Names and patterns of fields that may be dropped (`data.ignore`).
            reserved: Ids of placeholder tokens for media that this run does not provide. They must not occur in texts.
            preferences: Whether preference rows are refused, allowed or required.
            labeled_responses: Whether labeled responses (KTO) are accepted.
            schemas: Format settings of each source.
            trains_decoders: Whether decoder losses train on the chosen responses of preference rows.
            turns: The format of turns, for a speech model that has speakers and generates no text.
            thinking: The settings for reasoning in assistant messages.
            score_head: The head of a sequence classification model; None for other models.

        Raises:
            UserError: If the tokenizer is slow, or lacks a special token of a modality.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"{tokenizer.name_or_path}: the tokenizer ({type(tokenizer).__name__}) is not a fast tokenizer, so it "
                "cannot tell which characters belong to a token. Convert it to a fast tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.append_eos = append_eos
        # Call the Rust tokenizer directly: it takes half the time of the wrapper in transformers.
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

        modalities = modalities or {}
        self.reads_margin = score_head is not None and score_head.problem == "reward"
        self.fields = RowFields(modalities, ignore, preferences, labeled_responses, self.reads_margin)
        self.labels: LabelReader | None = None
        if score_head is not None and score_head.problem != "reward":
            self.labels = LabelReader(score_head)
        self.notation = MediaNotation(modalities, self.fields)
        self.positions = positions
        self.seed = seed
        self.trains_decoders = trains_decoders
        self.turns = turns
        self.thinking = thinking
        self.placeholders = self._check_marks()
        self.reserved = list(reserved)
        for modality in modalities.values():
            if modality.follower is not None:
                modality.follower.read_with(tokenizer)
        self.conventions: dict[str, Conventions] = {}  # keyed by the Jinja source of the chat template
        self.schemas = schemas
        # Modalities with an encoder, and modalities with a decoder.
        self.encoded = [name for name, modality in modalities.items() if modality.encoder is not None]
        self.decoded = [name for name, modality in modalities.items() if modality.decoder is not None]

    def _check_marks(self) -> list[int]:
        """Check that all marks are special tokens, and return the ids of the placeholder tokens."""
        modalities = self.notation.modalities
        added = self.tokenizer.get_added_vocab()
        for name, modality in modalities.items():
            if modality.follower is not None and modality.encoder is None:
                continue  # a follower has no tokens in the sequence
            optional_marks = filter(None, (modality.begin, modality.end, modality.last))
            for mark in (modality.placeholder, *modality.marks, *optional_marks):
                if mark not in added:
                    raise UserError(
                        f"model.modalities.{name}: the mark {mark!r} is not a special token of the tokenizer "
                        f"{self.tokenizer.name_or_path}. Add it to the tokenizer, or choose another mark."
                    )
        self.last = {name: added[modality.last] for name, modality in modalities.items() if modality.last}
        return sorted({added[modality.placeholder] for modality in modalities.values() if modality.placeholder})

    def render(self, row: Row, key: tuple[int, int, int] = (0, 0, 0), find: Find = HERE.find) -> RenderedRow:
        """Render a row for training, if it becomes a single sample. See `render_samples` for the arguments."""
        (sample,) = self.render_samples(row, key, find)
        return sample

    def render_samples(
        self,
        row: Row,
        key: tuple[int, int, int] = (0, 0, 0),
        find: Find = HERE.find,
        other: Row | None = None,
        find_other: Find = HERE.find,
    ) -> list[RenderedRow]:
        """Render a row for training.

        Args:
            row: The row.
            key: Source, epoch and row number, from which the random seeds of media items are derived.
            find: Returns the media files that the row refers to.
            other: A row whose responses are also paired with the prompt of this row, for the KTO baseline.
            find_other: Returns the media files that `other` refers to.

        Returns:
            The samples of the row. A conversation has several samples if the chat template drops the reasoning of
            earlier turns (`data.thinking: template`).

        Raises:
            BadRow: If the row cannot be used.
        """
        if self.labels is not None:
            return [self._render_labeled(row, self.labels, key, find)]
        schema = self.schema(key[0])
        present = self.fields.present(row)
        if not self.fields.has_preference(present, prompt_fixes(present, schema)):
            parsed = self._conversation(row, present, schema)
            if "input_ids" in parsed.row:
                return [replace(self.token_rows.render(parsed.row), row_schema=parsed.format)]
            response = ResponseRow("", parsed.row, parsed.prompt)
            samples = []
            for choice in self._choices(parsed.row):
                rendered_row = self._render_response(response, key, find, find, choice)
                samples.append(replace(rendered_row, row_schema=parsed.format))
            return samples

        present = with_json(present, schema, self.fields.modalities)
        rows = response_rows(present, self.fields.labeled_responses)
        responses = [(response, find) for response in rows]
        if other is not None:
            other_present = with_json(self.fields.present(other), schema, self.fields.modalities)
            if not self.fields.has_preference(other_present):
                raise BadRow("the other row has no responses")
            responses += [(response, find_other) for response in mismatched_rows(present, other_present)]
        rendered = []
        for response, find_response in responses:
            rendered.append((response.role, self._render_response(response, key, find, find_response)))
        joined = join_responses(rendered, self.trains_decoders)
        if self.reads_margin and "margin" in present:
            margins = make_columns(**{MARGIN: np.full(len(joined), read_margin(present))})
            joined = replace(joined, columns={**joined.columns, **margins})
        return [joined]

    def _render_labeled(self, row: Row, labels: LabelReader, key: tuple[int, int, int], find: Find) -> RenderedRow:
        """Render a row with labels, for sequence classification. All of its tokens count as targets."""
        classes, row = labels.read(row, self.fields.ignored)
        parsed = self._conversation(row, self.fields.present(row), self.schema(key[0]))
        if "input_ids" in parsed.row:
            raise BadRow("pre-tokenized rows cannot be classified. Use `text` or `messages`")
        if "weight" in parsed.row:
            raise BadRow("`weight` is not supported for rows with labels. Add it to data.ignore to drop it")
        rendered = self._render_response(ResponseRow("", parsed.row, parsed.prompt), key, find, find)
        columns = make_columns(**{CLASSES: np.repeat(classes[..., None], len(rendered), axis=-1)})
        return replace(rendered, columns={**rendered.columns, **columns}, is_prose=False, row_schema=parsed.format)

    def _choices(self, row: Row) -> list[TurnChoice | None]:
        """Choose the samples of a row: for each one, the messages that it contains and the messages that it trains on.

        The only entry is None if the row is not split, so that one sample contains the whole row.
        """
        field = next(name for name in CONVERSATION if name in row)
        if field == "text" or self.turns is not None or not _may_contain_reasoning(row[field]):
            return [None]
        template, messages = self._read_chat(row, field)
        for message in messages:
            message["content"] = plain(message.get("content"))
        choices = self.thinking.choose(template, messages)
        return list(choices) if len(choices) > 1 or choices[0].stop < len(messages) else [None]

    def format_of(self, row: Row, source: int) -> tuple[str, str]:
        """Detect the format of a row.

        Args:
            row: The row.
            source: Index of its source.

        Returns:
            The name of the format and the reason for the match; two empty strings if no format matches.

        Raises:
            BadRow: If several formats match.
        """
        if self.labels is not None:
            _, row = self.labels.read(row, self.fields.ignored)
        present = self.fields.present(row)
        if self.fields.has_preference(present):
            return "preference", "a loss of the run uses its responses"
        parsed = self.parse_conversation(row, present, self.schema(source))
        return (parsed.format, parsed.why) if parsed else ("", "")

    def schema(self, source: int) -> SourceSchema:
        """Return the format settings of a source, by its index."""
        return self.schemas[source] if source < len(self.schemas) else DEFAULT_SCHEMA

    def _conversation(self, row: Row, present: Row, schema: SourceSchema) -> ParsedRow:
        """Detect the format of a row without preferences, and convert the row. Raises `BadRow` if no format matches."""
        parsed = self.parse_conversation(row, present, schema)
        if parsed is None:
            self.fields.check_conversation(present, row, columns_fixes(row, present, schema, self.fields.modalities))
        assert parsed is not None, "without a conversation, a row is bad"
        self.fields.check_conversation(parsed.row, row)
        return parsed

    def parse_conversation(self, row: Row, present: Row, schema: SourceSchema) -> ParsedRow | None:
        """Detect the format of a row without preferences, and convert the row. Return None if no format matches.

        Args:
            row: The whole row.
            present: The fields that are neither empty nor ignored.
            schema: Format settings of the source.
        """
        if schema.format == "preference":
            schema = replace(schema, format=None)  # `check_conversation` then reports which fields are missing
        not_ignored = {name: value for name, value in row.items() if name not in self.fields.ignored}
        parsed = parse_row(not_ignored, present, self.encoded, self.decoded, schema)
        # If the conversation is empty, return it, because later checks have a specific error message for this case.
        if parsed is None and any(name in present for name in CONVERSATION):
            return ParsedRow("", "", present)
        return parsed

    def _render_response(
        self,
        response: ResponseRow,
        key: tuple[int, int, int],
        find: Find,
        find_response: Find,
        choice: TurnChoice | None = None,
    ) -> RenderedRow:
        """Render a row without preferences, or one response with its prompt.

        Args:
            response: The row with a single response.
            key: Source, epoch and row number.
            find: Returns the media files that the prompt refers to.
            find_response: Returns the media files that the response refers to.
            choice: The messages that the sample contains and trains on; None for the whole row.
        """
        row = response.row
        field = next(name for name in CONVERSATION if name in row)
        is_text = field == "text"
        schema = self.schema(key[0])
        media = RowMedia(self.notation, row, find, (self.seed, *key), is_chat=not is_text, schema=schema)
        tokens = self._tokenize(response, field, media, find_response, choice)
        ids, weights, items, item_spans = place(tokens, media, self.placeholders, self.last)
        items = locate_followed(ids, items, media)

        is_target = (weights > 0) | (self.labels is not None)
        if self.labels is None and not is_target[1:].any() and not any(item.is_target for item in items):
            raise BadRow("no targets: no token contributes to the loss (the first token never does)")
        has_unit_weights = bool((weights[is_target] == 1).all())
        columns = make_columns(
            input_ids=ids,
            labels=np.where(is_target, ids, IGNORE_INDEX),
            position_ids=self._positions(ids, items),
            loss_weights=None if has_unit_weights else weights,
        )
        return RenderedRow(
            columns,
            items,
            is_prose=is_text and not response.prompt,
            item_spans=item_spans,
            num_prompt_items=len(items) if media.num_prompt_items is None else media.num_prompt_items,
        )

    def _tokenize(
        self, response: ResponseRow, field: str, media: RowMedia, find_response: Find, choice: TurnChoice | None
    ) -> TokenizedText:
        """Tokenize a row with a single response. Its text or messages are in `field`."""
        row = response.row
        if self.turns is not None:
            if response.role:
                raise BadRow("preference losses need text targets, but this model does not generate text")
            tokens = self._tokens_of_turns(write_turns(row, field, self.turns, media, self.special_tokens))
        elif field == "text":
            tokens = self._render_text(row, media, response.prompt)
        else:
            tokens = self._render_chat(response, field, media, find_response, choice)

        if self.reserved:
            reserved_ids = np.intersect1d(tokens.ids, self.reserved)
            if len(reserved_ids):
                token = self.tokenizer.convert_ids_to_tokens(int(reserved_ids[0]))
                raise BadRow(f"the text contains {token!r}, a placeholder for media that this run does not use")
        if "weight" in row:
            weight = read_weight(row["weight"], "`weight`")
            if not weight:
                raise BadRow("no targets: `weight` is 0")
            tokens = replace(tokens, weights=tokens.weights * np.float32(weight))
        return tokens

    def prompt(self, value: list[Message] | str, find: Find = HERE.find) -> RenderedRow:
        """Render a prompt for generation.

        Args:
            value: The messages of a conversation, or a text. A text is a user message or, if the tokenizer has no chat
                template, the beginning of a text to continue.
            find: Returns the media files that the messages refer to.

        Returns:
            The prompt, without labels.

        Raises:
            BadRow: If the messages cannot be rendered.
        """
        media = RowMedia(self.notation, {}, find, (self.seed, 0, 0, 0))
        if self.turns is not None:
            messages = [{"role": self.turns.default, "content": value}] if isinstance(value, str) else value
            row = {"messages": messages}
            text = write_turns(row, "messages", self.turns, media, self.special_tokens, is_prompt=True)
            return self._prompt(text, media)
        if isinstance(value, str) and not self.tokenizer.chat_template:
            return self._prompt(media.text(value), media, add_special_tokens=True)
        conversation = [{"role": "user", "content": value}] if isinstance(value, str) else value
        template, messages = self._read_chat({"messages": conversation}, "messages")
        self._write(messages, media)
        return self._chat_prompt(template, messages, media)

    def question(self, row: Row, find: Find = HERE.find, schema: SourceSchema = DEFAULT_SCHEMA) -> Question:
        """Split a row into a prompt for generation and the expected response.

        The expected response consists of the last messages of the assistant. If the row is a plain text without a
        prompt, it is the second half of the text.

        Args:
            row: The row.
            find: Returns the media files that the row refers to.
            schema: Format settings of the source.

        Raises:
            BadRow: If the row cannot be used as a prompt, for example because it is a preference row.
        """
        present = self.fields.present(row)
        if self.fields.has_preference(present):
            raise BadRow("a preference row has no single expected response, so it cannot be used as a prompt")
        parsed = self._conversation(row, present, schema)
        if "input_ids" in parsed.row:
            return Question(*self.token_rows.split(parsed.row))
        field = next(name for name in CONVERSATION if name in parsed.row)
        media = RowMedia(self.notation, parsed.row, find, (self.seed, 0, 0, 0), schema=schema)
        if self.turns is not None:
            text = write_turns(parsed.row, field, self.turns, media, self.special_tokens, is_prompt=True)
            return Question(self._prompt(text, media), transcript(parsed.row[field]), None)
        if field == "text":
            return self._text_question(parsed.row, media, parsed.prompt)
        return self._chat_question(parsed.row, field, media)

    def _chat_question(self, row: Row, field: str, media: RowMedia) -> Question:
        """Implement `question` for a row with messages in `field`."""
        template, messages = self._read_chat(row, field)
        media.place_untagged(messages)
        num_prompt = len(messages)
        while num_prompt and messages[num_prompt - 1]["role"] == "assistant":
            num_prompt -= 1
        if not num_prompt:
            raise BadRow("no prompt: all messages are from the assistant. Add a user message.")
        prompt = messages[:num_prompt]
        response = messages[num_prompt:]
        shown = transcript(prompt)
        num_items = 0  # number of items in the prompt
        for number, message in enumerate(messages):
            is_response = number >= num_prompt
            message.pop("loss")
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), is_response, f"`content` of message {number}")
            if not is_response:
                num_items = len(media.items)
        media.check_counts()  # after all messages, because media columns also contain the items of the response
        expected = self._expected_text(template, messages, num_prompt, media, num_items) if response else None
        expected_items = tuple(item for item in media.items[num_items:] if item.port.role == "decoder")
        media.items = media.items[:num_items]
        media.texts = media.texts[:num_items]
        return Question(self._chat_prompt(template, prompt, media), shown, expected, expected_items)

    def _expected_text(
        self, template: ChatTemplate, messages: list[Message], num_prompt: int, media: RowMedia, num_items: int
    ) -> str:
        """Return the text that the model should generate, without special tokens. Media are written as `[modality]`.

        Args:
            template: The chat template.
            messages: The messages, with their contents as text.
            num_prompt: Number of messages before the response.
            media: The media items of all messages.
            num_items: Number of items before the response.
        """
        weights = [float(number >= num_prompt) for number in range(len(messages))]
        text, targets = target_spans(template, messages, weights)
        response = "\n".join(text[slice(*span)] for span, _ in targets)
        expected = ""
        for item, item_text in zip(media.items[num_items:], media.texts[num_items:], strict=True):
            if item.answer is None:
                before, _, response = response.partition(item_text.strip())
                expected += self._without_special_tokens(before) + f"[{item.port.modality}]"
        return expected + self._without_special_tokens(response)

    def _without_special_tokens(self, text: str) -> str:
        """Remove special tokens from a text by encoding and decoding it."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _text_question(self, row: Row, media: RowMedia, prompt: str) -> Question:
        """Implement `question` for a plain text. Split it after its prompt, or in the middle if it has no prompt."""
        content = row["text"]
        words = content.split(" ") if isinstance(content, str) else []
        if media.columns or len(words) < 2:
            raise BadRow("`text` has media or fewer than two words, so it cannot be split into prompt and response")
        beginning = prompt or " ".join(words[: len(words) // 2])
        rendered = self._prompt(media.text(beginning), media, add_special_tokens=True)
        return Question(rendered, beginning, content.removeprefix(beginning))

    def _chat_prompt(self, template: ChatTemplate, messages: list[Message], media: RowMedia) -> RenderedRow:
        """Render messages as a prompt that ends with the header of a response."""
        text, _ = media.widen(template.render(messages, prompt=True))
        return self._prompt(text, media)

    def _prompt(self, text: str, media: RowMedia, add_special_tokens: bool = False) -> RenderedRow:
        """Tokenize a prompt, and repeat the placeholder tokens of its media. The result has no labels."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        weights = np.ones(len(encoding), np.float32)
        token_ids = np.array(encoding.ids, np.int32)
        tokens = TokenizedText(text=text, ids=token_ids, offsets=encoding.offsets, weights=weights)
        ids, _, items, _ = place(tokens, media, self.placeholders, self.last)
        items = tuple(item for item in items if item.answer is None)  # drop followers: they do not use the prompt
        columns = make_columns(input_ids=ids, position_ids=self._positions(ids, items))
        return RenderedRow(columns, items)

    def _positions(self, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[Any] | None:
        """Return the position ids, `[rows, tokens]`; None if the positions are 0, 1, 2, ..."""
        if self.positions is None:
            return None
        try:
            positions = self.positions(ids, items)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None
        assert positions.shape[1:] == ids.shape, "one column of positions for every token"
        return positions

    @cached_property
    def token_rows(self) -> TokenRowRenderer:
        """The renderer for pre-tokenized rows."""
        if self.turns is not None:
            raise BadRow("pre-tokenized rows have text targets, but this model does not generate text")
        positions = partial(self._positions, items=())
        return TokenRowRenderer(self.tokenizer, [*self.placeholders, *self.reserved], positions)

    def end_of_turn(self) -> list[int]:
        """Return a list with the id of the token that ends a response; an empty list if there is no such token.

        It is the first special token after the response in a rendered test conversation, such as `<|im_end|>`,
        `<|eot_id|>` or `</s>`. It must be found this way, because many tokenizers do not declare it. Some templates
        write it only before the next message, so a second test conversation has a further message.
        """
        if not self.tokenizer.chat_template:
            return []
        response = "answer0x"
        added = set(self.tokenizer.added_tokens_decoder)
        user: Message = {"role": "user", "content": "question"}
        assistant: Message = {"role": "assistant", "content": response}
        for conversation in ([user, assistant], [user, assistant, dict(user)]):
            try:
                text = self._template(None).render(conversation)
            except BadRow:
                continue
            encoding = self.backend.encode(text, add_special_tokens=False)
            response_stop = text.rfind(response) + len(response)
            tokens = zip(encoding.ids, encoding.offsets, strict=True)
            ends = [token for token, (start, _) in tokens if start >= response_stop and token in added]
            if response in text and ends:
                return ends[:1]
        return []

    def _template(self, tools: list[Any] | None) -> ChatTemplate:
        """Return the chat template with these tools. Raises `UserError` if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{self.tokenizer.name_or_path}: the tokenizer has no chat template, which rows with messages need. "
                "Add a chat_template.jinja to its folder."
            )
        return ChatTemplate(self.tokenizer.get_chat_template(tools=tools), tools, self.special_tokens)

    def _conventions(self, template: ChatTemplate) -> Conventions:
        """Return the conventions of a template, from the cache if possible."""
        if template.source not in self.conventions:
            self.conventions[template.source] = Conventions(template.source, self.special_tokens)
        return self.conventions[template.source]

    def _read_chat(self, row: Row, field: str) -> tuple[ChatTemplate, list[Message]]:
        """Return the chat template with the tools of a row, and the messages of the row."""
        tools = read_list(row["tools"], "`tools`") if "tools" in row else None
        template = self._template(tools or None)
        conventions = self._conventions(template)
        messages = read_messages(row[field], field, row.get("system"), conventions, self.fields)
        self.thinking.prepare(messages)
        return template, messages

    def _write(
        self,
        messages: list[Message],
        media: RowMedia,
        find_response: Find = HERE.find,
        num_response: int = 0,
        stop: int | None = None,
    ) -> list[float]:
        """Convert the contents of messages to text, in place.

        Args:
            messages: The messages. Their `loss` keys are removed.
            media: Collects the media items.
            find_response: Returns the media files that the response of a preference row refers to.
            num_response: Number of messages at the end that form the response of a preference row; 0 for other rows.
            stop: Media items of the first `stop` messages are collected; None for all messages.

        Returns:
            The loss weight of each message; 0 if it is not trained on.
        """
        weights = [message.pop("loss") for message in messages]
        media.place_untagged(messages)
        num_prompt = len(messages) - num_response
        num_kept: int | None = None
        for number, (message, weight) in enumerate(zip(messages, weights, strict=True)):
            if number == num_prompt:
                media.begin_response(find_response)
            if number == stop:
                num_kept = len(media.items)
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), weight > 0, f"`content` of message {number}")
        media.check_counts()  # after all messages, because media columns also contain the items of later messages
        if num_kept is not None:
            media.items = media.items[:num_kept]
            media.texts = media.texts[:num_kept]
        return weights

    def _render_text(self, row: Row, media: RowMedia, prompt: str) -> TokenizedText:
        """Tokenize the `text` of a row. All tokens are targets, except the tokens of `prompt` at its beginning."""
        content = row["text"]
        # If the row has no media columns, tags such as <image> are plain text.
        is_plain = isinstance(content, str) and not media.columns
        text = media.text(content) if is_plain else media.write(content, True, "`text`")
        media.check_counts()
        if not text:
            raise BadRow("`text` is empty")
        text, _ = media.widen(text)
        if prompt and media.columns:
            raise BadRow("a row with a prompt as plain text cannot have media. Use `messages`.")

        encoding = self.backend.encode(text)
        ids = encoding.ids
        offsets = encoding.offsets if media.items else []  # read only if needed, because reading offsets is slow
        weights = np.ones(len(ids), np.float32)
        if prompt:
            # Special tokens that the tokenizer adds have the offset 0. Make the offsets increasing.
            ends = np.maximum.accumulate([end for _, end in encoding.offsets])
            weights[ends <= len(prompt)] = 0
        if self.append_eos:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise UserError(
                    f"data.append_eos: the tokenizer {self.tokenizer.name_or_path} has no end-of-sequence token. Set "
                    "data.append_eos: false."
                )
            if ids[-1:] != [eos]:
                ids.append(eos)
                offsets.append((len(text), len(text)))
                weights = np.append(weights, np.float32(1))
        return TokenizedText(text=text, ids=np.array(ids, np.int32), offsets=offsets, weights=weights)

    def _render_chat(
        self, response: ResponseRow, field: str, media: RowMedia, find_response: Find, choice: TurnChoice | None
    ) -> TokenizedText:
        """Tokenize the messages of a row, and check that the chat template drops none of their content."""
        template, messages = self._read_chat(response.row, field)
        conventions = self._conventions(template)
        if choice is not None:
            for number, message in enumerate(messages):
                message["loss"] *= number in choice.trained
        stop = len(messages) if choice is None else choice.stop
        message_weights = self._write(messages, media, find_response, response.messages, stop)[:stop]
        messages = messages[:stop]
        conventions.check_tools(template.tools)
        conventions.check_fields(messages, template.tools, self.fields)
        check_calls(template, messages)
        if self.labels is None:
            text, targets = target_spans(template, messages, message_weights)
        else:
            text, targets = template.render(messages), []
        if self.thinking.mode == "keep":
            text, targets = keep_thoughts(template, messages, text, targets)
        conventions.check(messages, template.tools, text)

        text, marks = media.widen(text, [mark for span, _ in targets for mark in span])
        spans = zip(marks[::2], marks[1::2], strict=True)
        encoding = self.backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets  # read once, because each access builds a new list
        weights = np.zeros(len(encoding), np.float32)
        for span, (_, weight) in zip(spans, targets, strict=True):
            for first, last in tokens_of_spans(offsets, [span]):
                weights[first:last] = weight
        return TokenizedText(text=text, ids=np.array(encoding.ids, np.int32), offsets=offsets, weights=weights)

    def _tokens_of_turns(self, text: str) -> TokenizedText:
        """Tokenize the turns of speakers. Only placeholder tokens are targets."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        weights = np.isin(ids, self.placeholders).astype(np.float32)
        return TokenizedText(text=text, ids=ids, offsets=encoding.offsets, weights=weights)


def _may_contain_reasoning(messages: Any) -> bool:
    """Whether messages in any convention may contain reasoning. This is a quick check that may be wrongly true."""
    text = str(messages).lower()
    return "think" in text or "reasoning" in text


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as readable text, one per line, each with its role."""
    return "\n".join(f"{message['role']}: {plain(message.get('content'))}" for message in messages)


def plain(content: Any) -> str:
    """Return the content of a message as readable text. A media item is written as its type, such as `[image]`."""
    if not isinstance(content, list):
        return str(content or "")
    parts = [part for part in content if isinstance(part, dict)]
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
