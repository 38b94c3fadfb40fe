"""Text, and whatever else a model has decoders for, one token or row at a time with a key-value cache.

At a modality's begin token its decoder takes over, feeds its rows back through the foundation, and hands over again at
the end token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, Item, Modality, Sampling
from omnizoo.models.media_batch import place
from omnizoo.models.omni import OmniModel, last_hidden_state


@dataclass(frozen=True)
class Piece:
    """A stretch of what was generated: token ids of text, or the rows of an item and what they stand for."""

    modality: str  # "text" or a modality's name
    ids: list[int]
    rows: torch.Tensor | None = None
    item: Any = None


class Conversation:
    """A model in the middle of writing: what it has seen is in the cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.foundation: PreTrainedModel = model.foundation if isinstance(model, OmniModel) else model
        self.cache = DynamicCache(config=self.foundation.config)
        self.logits = self.hidden = torch.empty(0)  # of the last place

    def feed(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Show the model `[T, width]` more; returns the hidden state of the last place."""
        kept: list[torch.Tensor] = []
        with last_hidden_state(self.foundation, kept.append):
            out = self.foundation(
                inputs_embeds=embeddings[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self.logits, self.hidden = out.logits[0, -1], kept[0][0, -1]
        return self.hidden

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        rows: torch.Tensor = self.foundation.get_input_embeddings()(torch.tensor(ids, device=self.model.device))
        return rows

    def read(self, ids: Sequence[int], items: Sequence[Item]) -> None:
        embeddings = self.embed(ids)
        for item in items:
            assert isinstance(self.model, OmniModel)
            assert item.inputs is not None
            name = item.port.modality
            inputs = place(item.inputs, self.model.device, embeddings.dtype)
            if item.port.role == "encoder":
                rows = self.model.encoder(name).encode([inputs])
            else:
                decoder = self.model.decoder(name)
                rows = decoder.embed(decoder.targets([inputs]))
            places = torch.cat([torch.arange(first, first + count) for first, count in item.spans])
            embeddings = embeddings.index_put((places.to(rows.device),), rows.to(embeddings.dtype))
        self.feed(embeddings)


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    modalities: Mapping[str, Modality],
    ids: Sequence[int],
    items: Sequence[Item] = (),
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
) -> list[Piece]:
    """What `model` (whole, on one device) writes after a prompt, until a `stop` token or `max_tokens` tokens of text.

    Rows of produced items do not count; a decoder ends its items itself.
    """
    sampling = sampling or Sampling()
    name = model.config.get_text_config()._attn_implementation
    if name == "packed":
        raise UserError("generate needs a model loaded by from_pretrained: packed attention has no cache")
    model.eval()
    conversation = Conversation(model)
    conversation.read(ids, items)
    begins = {tokenizer.convert_tokens_to_ids(m.begin): m for m in modalities.values() if m.decoder and m.begin}
    never = [tokenizer.convert_tokens_to_ids(m.placeholder) for m in modalities.values()]
    stops = {*stop, tokenizer.eos_token_id}
    pieces: list[Piece] = []
    for _ in range(max_tokens):
        if not torch.isfinite(conversation.logits).all():
            raise UserError("the model's logits are not finite: its weights are damaged, or training diverged")
        conversation.logits[never] = -torch.inf
        token = int(sampling.draw(conversation.logits[None])[0])
        if token in stops:
            break
        if token in begins:
            pieces.append(_produce(conversation, begins[token], token, tokenizer, sampling))
            continue
        if not pieces or pieces[-1].modality != "text":
            pieces.append(Piece("text", []))
        pieces[-1].ids.append(token)
        conversation.feed(conversation.embed([token]))
    return pieces


def _produce(conversation: Conversation, modality: Modality, begin: int, tokenizer: Any, sampling: Sampling) -> Piece:
    assert isinstance(conversation.model, OmniModel)
    decoder: Decoder = conversation.model.decoder(modality.name)
    hidden = conversation.feed(conversation.embed([begin]))
    rows = decoder.generate(hidden, lambda row: conversation.feed(row[None]), sampling)
    if modality.end:
        conversation.feed(conversation.embed([tokenizer.convert_tokens_to_ids(modality.end)]))
    return Piece(modality.name, [], rows, decoder.render(rows))
