"""Render a row of a diffusion transformer: a prompt, and an item that the model learns to generate from it.

A sample has no token ids. Its length is the number of tokens of the transformer, for the latents and for the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from omnizoo.data.row import DEFAULT_SCHEMA, BadRow, Row, SourceSchema
from omnizoo.data.rows.media import Find, read_value, seed_of
from omnizoo.data.rows.unused_fields import RowFields, is_empty
from omnizoo.data.sample import RenderedRow
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.base import Modality
from omnizoo.modalities.denoised import EMPTY_TEXT, LATENTS, DenoisedItem, EncodedItem, LatentFile, encoded_value
from omnizoo.modalities.item import MediaItem, MediaSize, Port
from omnizoo.modalities.media import BadMedia, Media, MissingMedia

PROMPT = "prompt"
PROMPT_DROPPED = 1  # in the seed of the random number that decides whether a prompt is dropped


class TextGeometry(Protocol):
    """The number of text tokens of a prompt, without the weights of the text encoders."""

    def text_tokens(self, prompt: str) -> int:
        """Return the number of text tokens that the transformer receives."""


@dataclass(frozen=True)
class Draft:
    """A row after its format has been read."""

    prompt: str
    name: str  # name of the item's field
    value: Any
    options: Mapping[str, Any]
    row_format: str


class PromptRenderer:
    """Renders rows to samples of one item each, for a diffusion transformer.

    Args:
        modalities: The items that the model generates, by the name of their field.
        geometry: Number of text tokens of a prompt.
        pack_tokens: Maximum number of tokens of a sample.
        text_dropout: Fraction of samples whose prompt is replaced by the empty prompt.
        seed: Seed of the run.
        ignore: Names and patterns of fields that may be dropped (`data.ignore`).
        schemas: Settings of each source.
    """

    def __init__(
        self,
        modalities: Mapping[str, Modality],
        geometry: TextGeometry,
        pack_tokens: int,
        text_dropout: float = 0.0,
        seed: int = 0,
        ignore: Sequence[str] = (),
        schemas: Sequence[SourceSchema] = (),
    ) -> None:
        self.modalities = modalities
        self.geometry = geometry
        self.pack_tokens = pack_tokens
        self.text_dropout = text_dropout
        self.seed = seed
        self.fields = RowFields(modalities, ignore, "refused", labeled_responses=False)
        self.schemas = schemas

    def schema(self, source: int) -> SourceSchema:
        """Return the settings of a source, by its index."""
        return self.schemas[source] if source < len(self.schemas) else DEFAULT_SCHEMA

    def format_of(self, row: Row, source: int) -> tuple[str, str]:
        """Return the format of a row, and the fields that determined it. `source` is the index of its source."""
        draft = self._read(row)
        return draft.row_format, f"it has `{draft.name}`"

    def prompt_of(self, row: Row) -> str:
        """Return the prompt of a row. Raises `BadRow` if the row cannot be used."""
        return self._read(row).prompt

    def render_samples(
        self,
        row: Row,
        key: tuple[int, int, int],
        find: Find,
        other: Row | None = None,
        find_other: Find | None = None,
    ) -> list[RenderedRow]:
        """Render a row.

        Args:
            row: The row.
            key: Source, epoch and row number, from which random seeds are derived.
            find: Returns the media files that the row refers to.
            other: Not used.
            find_other: Not used.

        Returns:
            One sample.

        Raises:
            BadRow: If the row cannot be used.
        """
        draft = self._read(row)
        is_dropped = self._is_dropped(key)
        prompt = "" if is_dropped else draft.prompt
        media, size, text_tokens = self._measure(draft, key, find, is_dropped)
        if text_tokens is None:
            text_tokens = self.geometry.text_tokens(prompt)
        num_tokens = size.num_placeholders + text_tokens
        if num_tokens > self.pack_tokens:
            name = encoded_value(media).name if media.modality == LATENTS else media.name
            raise BadRow(
                f"{name}: {size.num_placeholders} tokens of latents and {text_tokens} of text are more than "
                f"data.pack_tokens ({self.pack_tokens}). Raise it, or use smaller data.shapes."
            )
        notes = {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8)}
        item = MediaItem(
            port=Port(draft.name, "decoder"),
            size=size,
            spans=((text_tokens, size.num_placeholders),),
            is_target=True,
            raw=media,
            notes=notes,
        )
        columns = make_columns(input_ids=np.zeros(num_tokens), labels=np.full(num_tokens, IGNORE_INDEX))
        shape = (*map(int, size.shape), text_tokens)
        return [RenderedRow(columns, (item,), row_schema=draft.row_format, batch_shape=shape)]

    def _is_dropped(self, key: tuple[int, int, int]) -> bool:
        """Whether the prompt of a row is dropped in this epoch."""
        return seed_of(self.seed, *key, -PROMPT_DROPPED) / 2**64 < self.text_dropout

    def _read(self, row: Row) -> Draft:
        """Return the prompt and the item of a row. Raises `BadRow` if it lacks one, or has unused fields."""
        present = self.fields.present(row)
        if "messages" in present:
            return self._read_messages(present)
        names = [name for name in self.modalities if name in present]
        expected = ", ".join(f"`{name}`" for name in self.modalities)
        if len(names) != 1:
            amount = "none" if not names else " and ".join(f"`{name}`" for name in names)
            raise BadRow(f"expected one of {expected} as the item to generate; the row has {amount}")
        if PROMPT not in row:
            raise BadRow("`prompt` is missing. Rename the field with the text in `columns` of the source.")
        prompt = row[PROMPT]
        if not isinstance(prompt, str):
            raise BadRow(f"`prompt` is {type(prompt).__name__}, not a string")
        self.fields.check_used(present, {PROMPT, names[0]})
        return Draft(prompt, names[0], present[names[0]], {}, "prompt")

    def _read_messages(self, present: Row) -> Draft:
        """Return the prompt and the item of a row with messages: a user message, and an item of the assistant."""
        self.fields.check_used(present, {"messages"})
        messages = present["messages"]
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if roles != ["user", "assistant"]:
            raise BadRow(f"`messages` must be one of the user and one of the assistant, but the roles are {roles}")
        prompt = self._text_of(messages[0])
        content = messages[1].get("content")
        parts = content if isinstance(content, list) else [content]
        if len(parts) != 1 or not isinstance(parts[0], dict) or parts[0].get("type") not in self.modalities:
            expected = ", ".join(self.modalities)
            raise BadRow(f"the content of the assistant must be one part, whose `type` is one of {expected}")
        part = {name: value for name, value in parts[0].items() if not is_empty(value)}
        name = part.pop("type")
        value = part.pop(name, None)
        return Draft(prompt, name, part if value is None else value, part if value is not None else {}, "messages")

    def _text_of(self, message: Mapping[str, Any]) -> str:
        """Return the text of the user's message."""
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != 1 or len(parts) != 1 or not isinstance(texts[0], str):
            raise BadRow("the content of the user must be a text")
        return texts[0]

    def _measure(
        self, draft: Draft, key: tuple[int, int, int], find: Find, is_dropped: bool
    ) -> tuple[Media, MediaSize, int | None]:
        """Return the item of a row before it is decoded, its size, and the text tokens of an encoded prompt."""
        decoder = self.modalities[draft.name].decoder
        assert isinstance(decoder, DenoisedItem)
        label = draft.name
        value: Any
        try:
            if draft.name == LATENTS:
                value = encoded_item(draft.value, find)
                options: dict[str, Any] = {EMPTY_TEXT: True} if is_dropped else {}
            else:
                value, options = read_value(draft.value, find)
                options |= draft.options
                if not decoder.shapes:
                    raise BadRow("data.shapes is not set, but the row has a media file. Set it, such as [512x512].")
            media = Media(draft.name, value, options, seed_of(self.seed, *key, 0))
            label = media.name if draft.name != LATENTS else value.name
            if decoder.item_options is not None:
                self.fields.check_used(media.options, set(decoder.item_options), label)
            return media, decoder.measure(media), decoder.text_tokens(media)
        except MissingMedia as missing:
            raise BadRow(f"{label}: {missing}") from None
        except BadMedia as bad:
            raise BadRow(str(bad) if label in str(bad) else f"{label}: {bad}") from None


def encoded_item(value: Any, find: Find) -> EncodedItem:
    """Return the encoded item that a row refers to: an object of its source, or the path of a file."""
    if isinstance(value, str):
        found = find(value)
        if not isinstance(found, Path):
            raise BadMedia("expected the path of a safetensors file, but the source contains its bytes")
        return LatentFile(found)
    if not hasattr(value, "latent_shape"):
        raise BadMedia(f"expected the path of a safetensors file, not {type(value).__name__}")
    item: EncodedItem = value
    return item
