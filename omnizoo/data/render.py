"""A row becomes token ids, a mask of the tokens the loss is on, and the media items at their places among them.

Chat rows are written by the tokenizer's own template and tokenised once, as a whole. Which characters are the
assistant's is asked of the template too (by rendering variants of the conversation), never searched for in the text.
A media item is written with one placeholder for each run of its places, which is then repeated to the run's length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.data.chat_template import TEMPLATE_ERRORS, ChatTemplate
from omnizoo.data.formats import NOTHING_SAID, Shape, Taken, hint, which_format, with_json
from omnizoo.data.messages import Conventions, Message, read_list, read_messages, read_weight
from omnizoo.data.pairs import Side, mismatched_sides, sides_of
from omnizoo.data.placing import Tokens, follow, place, tokens_of_spans
from omnizoo.data.rendered import Rendered, join_answers
from omnizoo.data.row_fields import Fields, Pairs
from omnizoo.data.row_media import Find, Notation, RowMedia
from omnizoo.data.rows import CONVERSATION, BadRow, Folder, Row
from omnizoo.data.turns import write_turns
from omnizoo.modalities.base import Item, Modality
from omnizoo.modalities.item import BadMedia
from omnizoo.models.media_model import Ids, Positions, Turns

HERE = Folder(Path(), None)


@dataclass(frozen=True)
class Question:
    """A row as it is put to the model: all up to its last answer, which is what is `expected`."""

    prompt: Rendered
    shown: str  # as a reader sees it
    expected: str | None  # the text of the answer; None: the row has none


class Renderer:
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
        shapes: Sequence[Shape] = (),
        learns_answers: bool = True,
        turns: Turns | None = None,
    ) -> None:
        """`ignore`: fields of rows that may be left out. `reserved`: ids that stand for media which nobody feeds.
        `pairs`, `singles`, `learns_answers`: what becomes of preferences, by the losses of the run. `shapes`: how the
        rows of each source are said to be written. `turns`: the model has speakers, and writes no text."""
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path} is a slow one ({type(tokenizer).__name__}): it cannot tell which "
                "characters a token comes from; convert it to a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.append_eos = tokenizer, append_eos
        # the Rust tokenizer itself: calling it through transformers takes twice the time
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

        self.fields = Fields(modalities or {}, ignore, pairs, singles)
        self.notation, self.positions, self.seed = Notation(modalities or {}, self.fields), positions, seed
        self.learns_answers, self.turns = learns_answers, turns
        self.placeholders, self.reserved = self._check_marks(), list(reserved)
        for modality in (modalities or {}).values():
            if modality.follower is not None:
                modality.follower.read_with(tokenizer)
        self.conventions: dict[str, Conventions] = {}  # by chat template
        self.shapes = shapes
        known = self.notation.modalities
        self.read = [name for name, modality in known.items() if modality.encoder is not None]
        self.produced = [name for name, modality in known.items() if modality.decoder is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Without what was learnt of templates: it holds functions, and another process finds it out by itself."""
        return vars(self) | {"conventions": {}}

    def _check_marks(self) -> list[int]:
        """Ids of the placeholders."""
        modalities, added = self.notation.modalities, self.tokenizer.get_added_vocab()
        for name, modality in modalities.items():
            if modality.follower is not None and modality.encoder is None:
                continue  # it takes no place
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
    ) -> Rendered:
        """`key` is (source, epoch, row), which random numbers of its media depend on; `find` opens what it names.
        `other`: a row whose answers are to follow the prompt of this one, too; `find_other` opens what that names."""
        shape, given = self.shape(key[0]), self.fields.given(row)
        if self.fields.has_preference(given):
            given = with_json(given, shape, self.fields.modalities)
            sides = [(side, find) for side in sides_of(given, self.fields.singles)]
            if other is not None:
                there = with_json(self.fields.given(other), shape, self.fields.modalities)
                if not self.fields.has_preference(there):
                    raise BadRow("the other row has no answers")
                sides += [(side, find_other) for side in mismatched_sides(given, there)]
            rendered = [
                (side.role, self._render_one(side.row, key, find, side, find_answer)) for side, find_answer in sides
            ]
            return join_answers(rendered, self.learns_answers)
        taken = self._conversation(row, given, shape)
        return replace(self._render_one(taken.row, key, find, prompt=taken.prompt), format=taken.format)

    def format_of(self, row: Row, source: int) -> tuple[str, str]:
        """What a row of a source is taken as, and why; nothing if no rule fits, or several do."""
        shape, given = self.shape(source), self.fields.given(row)
        try:
            if self.fields.has_preference(given):
                return "preference", "a loss of the run reads its answers"
            taken = self.taken_as(row, given, shape)
        except BadRow:
            return "", ""
        return (taken.format, taken.why) if taken else ("", "")

    def shape(self, source: int) -> Shape:
        """What the config says of the rows of a source."""
        return self.shapes[source] if source < len(self.shapes) else NOTHING_SAID

    def _conversation(self, row: Row, given: Row, shape: Shape) -> Taken:
        """A row without preferences, in its format; BadRow if it is in none."""
        taken = self.taken_as(row, given, shape)
        if taken is None:
            self.fields.conversation(given, row, hint(given, shape))
        assert taken is not None, "without a conversation, a row is bad"
        self.fields.conversation(taken.row, row)
        return taken

    def taken_as(self, row: Row, given: Row, shape: Shape) -> Taken | None:
        """The format of a row without preferences; `given`: what is not to be ignored of it."""
        if shape.format == "preference":
            shape = replace(shape, format=None)  # and what is missing is said
        offered = {name: value for name, value in row.items() if name not in self.fields.names}
        taken = which_format(offered, self.read, self.produced, shape, given)
        if taken is None and any(name in given for name in CONVERSATION):  # an empty one is worth its own message
            return Taken("", "", given)
        return taken

    def _render_one(
        self,
        given: Row,
        key: tuple[int, int, int],
        find: Find,
        side: Side | None = None,
        find_answer: Find | None = None,
        prompt: str = "",
    ) -> Rendered:
        """Of what a row says, or one side of a pair; `find_answer` opens what its answer names. Of a text, the loss is
        not on its `prompt`."""
        field = next(name for name in CONVERSATION if name in given)
        is_text, prompt = field == "text", side.prompt if side else prompt
        media = RowMedia(self.notation, given, find, (self.seed, *key), is_chat=not is_text)
        if self.turns is not None:
            if side is not None:
                raise BadRow("a preference is judged by text, which this model does not write")
            tokens = self._tokens_of_turns(write_turns(given, field, self.turns, media, self.special_tokens))
        elif is_text:
            tokens = self._render_text(given, media, prompt)
        else:
            answer = (side.messages, find_answer or find) if side else None
            tokens = self._render_chat(given, field, media, answer)
        if self.reserved and len(found := np.intersect1d(tokens.ids, self.reserved)):
            token = self.tokenizer.convert_ids_to_tokens(int(found[0]))
            raise BadRow(f"its text contains {token!r}, which stands for media that nothing feeds to this model")
        if "weight" in given:
            weight = read_weight(given["weight"], "its `weight`")
            if not weight:
                raise BadRow("no token to learn: its `weight` is 0")
            tokens = replace(tokens, weights=tokens.weights * np.float32(weight))
        ids, weights, items, extents = place(tokens, media, self.placeholders, self.notation.modalities, self.last)
        items = follow(ids, items, media.answers, self.notation.modalities)
        targets = weights > 0
        if not targets[1:].any() and not any(item.is_target for item in items):
            raise BadRow("no token to learn: the loss is on none of its tokens, or on the first one only")
        positions = self._positions(ids, items)
        is_plain = bool((weights[targets] == 1).all())
        of_prompt = len(items) if media.of_prompt is None else media.of_prompt
        return Rendered(
            ids,
            targets,
            items,
            positions,
            None if is_plain else weights,
            is_prose=is_text and not prompt,
            extents=extents,
            of_prompt=of_prompt,
        )

    def prompt(self, value: list[Message] | str, find: Find = HERE.find) -> Rendered:
        """A conversation up to where the model shall write. A string is one message of the user's or, where there is no
        chat template, a text to go on with."""
        media = RowMedia(self.notation, {}, find, (self.seed, 0, 0, 0))
        if self.turns is not None:
            turn = [{"role": self.turns.default, "content": value}] if isinstance(value, str) else value
            text = write_turns({"messages": turn}, "messages", self.turns, media, self.special_tokens, asks=True)
            encoding = self.backend.encode(text, add_special_tokens=False)
        elif isinstance(value, str) and not self.tokenizer.chat_template:
            text = media.text(value)
            encoding = self.backend.encode(text)
        else:
            template = self._template(None)
            said = [{"role": "user", "content": value}] if isinstance(value, str) else value
            messages = read_messages(said, "messages", None, self._conventions(template), self.fields)
            self._write(messages, media)
            try:
                text = template.render(messages, prompt=True)[0]
            except TEMPLATE_ERRORS as error:
                raise BadRow(f"the chat template refuses these messages: {error}") from None
            text = media.widen(text)[0]
            encoding = self.backend.encode(text, add_special_tokens=False)
        return self._prompt(text, encoding, media)

    def question(self, row: Row, find: Find = HERE.find, shape: Shape = NOTHING_SAID) -> Question:
        """What a row asks, and what it answers: its last turns of the assistant; of a plain text, the second half."""
        given = self.fields.given(row)
        if self.fields.has_preference(given):
            raise BadRow("a preference has several answers: it is not put to the model as a question")
        taken = self._conversation(row, given, shape)
        given = taken.row
        field = next(name for name in CONVERSATION if name in given)
        media = RowMedia(self.notation, given, find, (self.seed, 0, 0, 0))
        if self.turns is not None:
            text = write_turns(given, field, self.turns, media, self.special_tokens, asks=True)
            encoding = self.backend.encode(text, add_special_tokens=False)
            shown = "\n".join(f"{message['role']}: {plain(message['content'])}" for message in given[field])
            return Question(self._prompt(text, encoding, media), shown, None)
        if field == "text":
            return self._begun_text(given, media, taken.prompt)
        tools = read_list(given["tools"], "`tools`") if "tools" in given else None
        template = self._template(tools or None)
        messages = read_messages(given[field], field, given.get("system"), self._conventions(template), self.fields)
        count = len(messages)
        while count and messages[count - 1]["role"] == "assistant":
            count -= 1
        if not count:
            raise BadRow("nobody asks anything: all of its messages are the assistant's")
        asked, answers = messages[:count], messages[count:]
        shown = "\n".join(f"{message['role']}: {plain(message.get('content'))}" for message in asked)
        expected = "\n".join(plain(message.get("content")) for message in answers) if answers else None
        for message in messages:
            message.pop("loss")
        for number, message in enumerate(messages):
            if number == count:
                items, texts = list(media.items), list(media.texts)
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), False, f"`content` of message {number}")
        media.check_counts()  # of the whole row, of which the answer's items are not shown
        if answers:
            media.items, media.texts = items, texts
        try:
            text = template.render(asked, prompt=True)[0]
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses these messages: {error}") from None
        text = media.widen(text)[0]
        encoding = self.backend.encode(text, add_special_tokens=False)
        return Question(self._prompt(text, encoding, media), shown, expected)

    def _begun_text(self, given: Row, media: RowMedia, prompt: str) -> Question:
        content = given["text"]
        if not isinstance(content, str) or media.columns or len(words := content.split(" ")) < 2:
            raise BadRow("a text with media, or of one word, has no first half to go on from")
        first = prompt or " ".join(words[: len(words) // 2])
        text = media.text(first)
        return Question(self._prompt(text, self.backend.encode(text), media), first, content.removeprefix(first))

    def _prompt(self, text: str, encoding: Any, media: RowMedia) -> Rendered:
        everywhere = np.ones(len(encoding), np.float32)
        tokens = Tokens(text, np.array(encoding.ids, np.int32), encoding.offsets, everywhere)
        ids, weights, items, _ = place(tokens, media, self.placeholders, self.notation.modalities, self.last)
        items = tuple(item for item in items if item.answer is None)  # a follower does not hear what was said before
        return Rendered(ids, weights > 0, items, self._positions(ids, items))

    def _positions(self, ids: Ids, items: Sequence[Item]) -> npt.NDArray[Any] | None:
        if self.positions is None:
            return None
        try:
            positions = self.positions(ids, items)
        except BadMedia as bad:
            raise BadRow(str(bad)) from None
        assert positions.shape[1:] == ids.shape, "one column of positions for every token"
        return positions

    def end_of_turn(self) -> list[int]:
        """The token that ends what the model writes, if the chat template has one: the first token after the answer
        that is not written in letters (`<|im_end|>`, `<|eot_id|>`, `</s>`).

        Tokenizers need not name it anywhere: often it is just one of the added tokens. Some templates end a turn by
        the beginning of the next one.
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
                text = self._template(None).render(conversation)[0]
            except (*TEMPLATE_ERRORS, BadRow):
                continue
            encoding = self.backend.encode(text, add_special_tokens=False)
            after = text.rfind(answer) + len(answer)
            tokens = zip(encoding.ids, encoding.offsets, strict=True)
            ends = [token for token, (start, _) in tokens if start >= after and token in added]
            if answer in text and ends:
                return ends[:1]
        return []

    def _template(self, tools: list[Any] | None) -> "ChatTemplate":
        if not self.tokenizer.chat_template:
            raise UserError(
                f"tokenizer {self.tokenizer.name_or_path} has no chat template, which rows with messages need; "
                "add a chat_template.jinja to its folder"
            )
        return ChatTemplate(self.tokenizer.get_chat_template(tools=tools), tools, self.special_tokens)

    def _conventions(self, template: "ChatTemplate") -> Conventions:
        """What is known of a template; asked anew for each, remembered for all rows."""

        def render(messages: list[Message], tools: list[Any] | None) -> str:
            try:
                return ChatTemplate(template.source, tools, template.special_tokens).render(messages)[0]
            except TEMPLATE_ERRORS as error:
                raise BadRow(f"the chat template refuses these messages: {error}") from None

        if template.source not in self.conventions:
            self.conventions[template.source] = Conventions(template.source, render)
        return self.conventions[template.source]

    def _write(self, messages: list[Message], media: RowMedia, answer: tuple[int, Find] | None = None) -> list[float]:
        """Contents become texts, in place; returns the weight of the loss on each message, 0 if it is not learnt.
        `answer`: of a preference, how many of the messages, and what opens the media in them."""
        wanted = [message.pop("loss") for message in messages]
        begins = len(messages) - answer[0] if answer else None
        for number, (message, loss) in enumerate(zip(messages, wanted, strict=True)):
            if answer and number == begins:
                media.begin_answer(answer[1])
            media.begin(message["role"])
            message["content"] = media.write(message.get("content"), loss > 0, f"`content` of message {number}")
        media.check_counts()
        return wanted

    def _render_text(self, row: Row, media: RowMedia, prompt: str) -> Tokens:
        content = row["text"]
        # in a row without media, words in angle brackets are just that
        is_plain = isinstance(content, str) and not media.columns
        text = media.text(content) if is_plain else media.write(content, True, "`text`")
        media.check_counts()
        if not text:
            raise BadRow("`text` is empty")
        text = media.widen(text)[0]
        if prompt and media.columns:
            raise BadRow("a preference pair of plain texts cannot have media; write it as messages")
        encoding = self.backend.encode(text)
        ids, offsets = encoding.ids, encoding.offsets if media.items else []  # which take a while to list
        weights = np.ones(len(ids), np.float32)
        if prompt:
            ends = np.maximum.accumulate([end for _, end in encoding.offsets])  # of tokens put around a text: 0
            weights[ends <= len(prompt)] = 0
        if self.append_eos:
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise UserError(f"tokenizer {self.tokenizer.name_or_path} has no eos token; set data.append_eos: false")
            if ids[-1:] != [eos]:
                ids.append(eos)
                offsets.append((len(text), len(text)))
                weights = np.append(weights, np.float32(1))
        return Tokens(text, np.array(ids, np.int32), offsets, weights)

    def _render_chat(self, row: Row, field: str, media: RowMedia, answer: tuple[int, Find] | None = None) -> Tokens:
        tools = read_list(row["tools"], "`tools`") if "tools" in row else None
        template = self._template(tools or None)
        conventions = self._conventions(template)
        messages = read_messages(row[field], field, row.get("system"), conventions, self.fields)
        wanted = self._write(messages, media, answer)
        conventions.check_fields(messages, tools, self.fields)
        try:
            text, spans = template.target_spans(messages, wanted)
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses these messages: {error}") from None
        conventions.check(messages, tools, text)
        text, marks = media.widen(text, [mark for span, _ in spans for mark in span])
        spans = [((a, b), weight) for a, b, (_, weight) in zip(marks[::2], marks[1::2], spans, strict=True)]
        encoding = self.backend.encode(text, add_special_tokens=False)
        offsets = encoding.offsets  # asked for once: every time, a list of all tokens is made
        weights = np.zeros(len(encoding), np.float32)
        for span, weight in spans:
            for first, last in tokens_of_spans(offsets, [span]):
                weights[first:last] = weight
        return Tokens(text, np.array(encoding.ids, np.int32), offsets, weights)

    def _tokens_of_turns(self, text: str) -> Tokens:
        """Of the text nothing is learnt; which items are, they say themselves."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        return Tokens(text, ids, encoding.offsets, np.isin(ids, self.placeholders).astype(np.float32))


def plain(content: Any) -> str:
    """The content of a message as a reader sees it: items by their names, in brackets."""
    if not isinstance(content, list):
        return str(content or "")
    parts = [part for part in content if isinstance(part, dict)]
    return " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in parts)
