"""Generate text and media, one token or target at a time, with a KV cache.

After the begin token of a modality, its decoder generates the item and feeds each target back into the language model.
Text generation continues after the end token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import ItemDecoder, Modality, VocabularyDecoder
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.interfaces.lm_head import last_hidden_state
from omnizoo.models.media.batch import prompt_batch
from omnizoo.models.media.media_model import MediaModel

PLACE = 0  # token id recorded for a position whose input is an embedding; only the number of ids matters


@dataclass(frozen=True)
class GeneratedPiece:
    """A part of a response: the token ids of text, or the targets of a media item and the rendered item."""

    modality: str  # "text" or the name of a modality
    ids: list[int]  # token ids of text; empty for media
    targets: torch.Tensor | None = None  # [targets, values per target]; None for text
    item: Any = None  # the item that the decoder or follower renders from `targets`


class Conversation:
    """State of a generation: the KV cache, and the logits and hidden state of the last position."""

    def __init__(self, model: PreTrainedModel, media: MediaModel) -> None:
        self.model = model
        self.media = media
        self.cache = DynamicCache(config=media.language.config)
        self.ids: list[int] = []  # token ids of all positions in the cache
        self.items: Sequence[MediaItem] = ()
        self.logits = self.hidden = torch.empty(0)  # of the last position: [vocabulary], [width]

    def read(self, ids: Sequence[int], items: Sequence[MediaItem]) -> None:
        """Run the model on a prompt. Its media items must be prepared for the encoders."""
        self.items = items
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=self.model.device)}
        if items:
            inputs["media"] = prompt_batch(items, self.media.ports, self.model.device, self.model.dtype)
        self._run(self.model, ids, **inputs)

    def write(self, token: int) -> torch.Tensor:
        """Run the model on one more token, and return the hidden state of its position, `[width]`."""
        return self._run(self.model, [token], input_ids=torch.tensor([[token]], device=self.model.device))

    def feed(self, embedding: torch.Tensor) -> torch.Tensor:
        """Run the language model on an embedding `[width]` instead of a token and return the hidden state `[width]`.

        The embedding occupies one position in the sequence.
        """
        return self._run(self.media.language, [PLACE], inputs_embeds=embedding[None, None])

    def _run(self, module: PreTrainedModel, ids: Sequence[int], **inputs: Any) -> torch.Tensor:
        """Run `module` on the next positions, and store the logits and hidden state of the last one."""
        self.ids += ids
        if self.media.positions is not None:  # in this model family, positions may differ from token indices
            positions = self.media.positions(np.array(self.ids, np.int32), self.items)[:, None, -len(ids) :]
            inputs["position_ids"] = torch.from_numpy(positions).to(self.model.device)

        hidden_states: list[torch.Tensor] = []
        last = torch.tensor([-1], device=self.model.device)
        with last_hidden_state(self.media.language, hidden_states.append):
            out = module(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=last)
        self.logits = out.logits[0, -1]
        self.hidden = hidden_states[0][0, -1]
        return self.hidden


OnPiece = Callable[[GeneratedPiece], None]


@dataclass(frozen=True)
class GenerativeModel:
    """An unsharded model on one device, with its tokenizer and the modalities that it accepts and generates."""

    model: PreTrainedModel
    media: MediaModel
    tokenizer: Any
    modalities: Mapping[str, Modality]

    @torch.no_grad()
    def follow(
        self, ids: Sequence[int], items: Sequence[MediaItem], options: Mapping[str, Any], sampling: Sampling
    ) -> list[GeneratedPiece]:
        """Run each follower on a conversation that ends with the response, and return one piece per follower.

        Each follower processes the conversation in one forward pass, as in training. `options` has the same keys as the
        options of a media item in a row.
        """
        pieces = []
        for module in self.media.modules_of("follower"):
            follower = self.modalities[module.modality].follower
            assert follower is not None
            with follower.capture() as hidden_states:
                Conversation(self.model, self.media).read(ids, items)
            rows = follower.rows_from(hidden_states, torch.tensor(ids, device=self.model.device))
            targets = follower.generate(rows, np.array(ids, np.int32), items, options, sampling)
            item = follower.render(targets, options)
            pieces.append(GeneratedPiece(module.modality, ids=[], targets=targets, item=item))
        return pieces

    @torch.no_grad()
    def generate(
        self,
        ids: Sequence[int],
        items: Sequence[MediaItem],
        max_tokens: int,
        sampling: Sampling,
        stop: Sequence[int],
        on_piece: OnPiece,
    ) -> list[GeneratedPiece]:
        """Generate the response to a prompt, up to a `stop` token or `max_tokens` text tokens.

        Args:
            ids: Token ids of the prompt.
            items: Media items of the prompt, prepared for the encoders.
            max_tokens: Maximum number of text tokens. Placeholder tokens of generated items do not count, because a
                decoder ends its items itself. A model that generates no text generates one item of at most this many
                placeholder tokens.
            sampling: Temperature, top-k, top-p and generator.
            stop: Tokens that end the response, in addition to the tokenizer's end-of-sequence token.
            on_piece: Called with a piece whenever it grows.

        Returns:
            The pieces of the response, in order.

        Raises:
            UserError: If the logits are not finite.
        """
        if self.media.speaker_format is not None:
            piece = self._generate_only_item(ids, items, max_tokens, sampling)
            on_piece(piece)
            return [piece]

        conversation = Conversation(self.model, self.media)
        conversation.read(ids, items)
        begin_tokens = self._begin_tokens()
        excluded_ids = self._excluded_ids()
        stop_ids = {*stop, self.tokenizer.eos_token_id}
        pieces: list[GeneratedPiece] = []
        for _ in range(max_tokens):
            if not torch.isfinite(conversation.logits).all():
                raise UserError("model: the logits are not finite. The weights are damaged, or training diverged.")
            conversation.logits[excluded_ids] = -torch.inf
            token = int(sampling.draw(conversation.logits[None])[0])

            if token in stop_ids:
                break
            if token in begin_tokens:
                pieces.append(self._generate_item(conversation, begin_tokens[token], token, sampling))
                on_piece(pieces[-1])
                continue

            if not pieces or pieces[-1].modality != "text":
                pieces.append(GeneratedPiece("text", []))
            pieces[-1].ids.append(token)
            on_piece(pieces[-1])
            conversation.write(token)
        return pieces

    def _begin_tokens(self) -> dict[int, Modality]:
        """Return the modalities that can be generated, by the id of their begin token."""
        by_token: dict[int, Modality] = {}
        for modality in self.modalities.values():
            if modality.decoder and modality.begin:
                by_token[self.tokenizer.convert_tokens_to_ids(modality.begin)] = modality
        return by_token

    def _excluded_ids(self) -> list[int]:
        """Return the tokens that are never sampled as text: placeholder tokens, and reserved ids of decoders."""
        ids: list[int] = []
        for modality in self.modalities.values():
            if modality.placeholder:
                ids.append(self.tokenizer.convert_tokens_to_ids(modality.placeholder))
            if isinstance(modality.decoder, VocabularyDecoder):
                ids += modality.decoder.reserved_ids
        return ids

    def _generate_only_item(
        self, ids: Sequence[int], items: Sequence[MediaItem], max_placeholders: int, sampling: Sampling
    ) -> GeneratedPiece:
        """Generate the response of a model that generates no text: one item of at most `max_placeholders` tokens."""
        generated = [modality for modality in self.modalities.values() if modality.decoder is not None]
        modality = generated[0]
        decoder = modality.decoder
        assert isinstance(decoder, ItemDecoder), f"{type(decoder).__name__} has no `generate_item`"

        batch = prompt_batch(items, self.media.ports, self.model.device, self.model.dtype)
        embeddings = self.media.embed(torch.tensor(ids, device=self.model.device), batch)
        targets = decoder.generate_item(embeddings, max_placeholders, sampling)
        return GeneratedPiece(modality.name, ids=[], targets=targets, item=decoder.render(targets))

    def _generate_item(
        self, conversation: Conversation, modality: Modality, begin: int, sampling: Sampling
    ) -> GeneratedPiece:
        """Generate a media item after its begin token, and append its end token to the conversation."""
        decoder = modality.decoder
        assert decoder is not None
        targets = decoder.generate(conversation.write(begin), conversation.feed, sampling)
        if modality.end:
            conversation.write(self.tokenizer.convert_tokens_to_ids(modality.end))
        return GeneratedPiece(modality.name, ids=[], targets=targets, item=decoder.render(targets))
