"""Text, and whatever else a model has decoders for, one token or target at a time with a key-value cache.

At a modality's begin token its decoder takes over, feeds what it makes back through the foundation, and hands over
again at the end token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Item, Modality, Sampling
from omnizoo.models.media_batch import whole_batch
from omnizoo.models.media_model import MediaModel
from omnizoo.models.omni import last_hidden_state

PLACE = 0  # stands for a token where there is none, but an item's embedding: for counting only


@dataclass(frozen=True)
class Piece:
    """A stretch of what was generated: token ids of text, or the targets of an item and what they stand for."""

    modality: str  # "text" or a modality's name
    ids: list[int]
    targets: torch.Tensor | None = None  # [n, K]
    item: Any = None


class Conversation:
    """A model in the middle of writing: what it has seen is in the cache."""

    def __init__(self, model: PreTrainedModel, media: MediaModel) -> None:
        self.model, self.media = model, media
        self.cache = DynamicCache(config=media.language.config)
        self.ids: list[int] = []  # of all that it has seen
        self.items: Sequence[Item] = ()
        self.logits = self.hidden = torch.empty(0)  # of the last place

    def read(self, ids: Sequence[int], items: Sequence[Item]) -> None:
        """Show the model a prompt with its items, which are prepared."""
        self.items = items
        media = {"media": whole_batch(items, self.media.ports, self.model.device, self.model.dtype)} if items else {}
        self._run(self.model, ids, input_ids=torch.tensor([ids], device=self.model.device), **media)

    def write(self, token: int) -> torch.Tensor:
        """Show the model one token more; returns the hidden state of its place."""
        return self._run(self.model, [token], input_ids=torch.tensor([[token]], device=self.model.device))

    def feed(self, embedding: torch.Tensor) -> torch.Tensor:
        """Show the model an embedding `[width]`, in the place of a token."""
        return self._run(self.media.language, [PLACE], inputs_embeds=embedding[None, None])

    def _run(self, module: PreTrainedModel, ids: Sequence[int], **inputs: Any) -> torch.Tensor:
        self.ids += ids
        if self.media.positions is not None:  # a family's own, which need not count tokens
            positions = self.media.positions(np.array(self.ids, np.int32), self.items)[:, None, -len(ids) :]
            inputs["position_ids"] = torch.from_numpy(positions).to(self.model.device)
        kept: list[torch.Tensor] = []
        last = torch.tensor([-1], device=self.model.device)
        with last_hidden_state(self.media.language, kept.append):
            out = module(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=last)
        self.logits, self.hidden = out.logits[0, -1], kept[0][0, -1]
        return self.hidden


@torch.no_grad()
def follow(
    model: PreTrainedModel,
    media: MediaModel,
    modalities: Mapping[str, Modality],
    ids: Sequence[int],
    items: Sequence[Item],
    options: Mapping[str, Any],
    sampling: Sampling,
) -> list[Piece]:
    """What the followers of `model` make of a conversation that ends in the answer; `options` are those of a row's
    item. They read it in one pass, as in training."""
    pieces = []
    for name in media.followers:
        follower = modalities[name].follower
        assert follower is not None
        with follower.reading() as kept:
            Conversation(model, media).read(ids, items)
        states = follower.read(kept, torch.tensor(ids, device=model.device))
        targets = follower.generate(states, np.array(ids, np.int32), items, options, sampling)
        pieces.append(Piece(name, [], targets, follower.render(targets, options)))
    return pieces


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    media: MediaModel,
    tokenizer: Any,
    modalities: Mapping[str, Modality],
    ids: Sequence[int],
    items: Sequence[Item] = (),
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    told: Callable[[Piece], None] | None = None,
) -> list[Piece]:
    """What `model` (whole, on one device) writes after a prompt, until a `stop` token or `max_tokens` tokens of text.

    Places of produced items do not count; a decoder ends its items itself. A model that writes no text says one item,
    of `max_tokens` places at most. `told` gets a piece whenever it has become
    longer, or is there.
    """
    sampling = sampling or Sampling()
    name = model.config.get_text_config()._attn_implementation
    if name == "packed":
        raise UserError("generate needs a model loaded by from_pretrained: packed attention has no cache")
    model.eval()
    if media.turns is not None:
        piece = _speak(model, media, modalities, ids, items, max_tokens, sampling)
        if told is not None:
            told(piece)
        return [piece]
    conversation = Conversation(model, media)
    conversation.read(ids, items)
    begins = {tokenizer.convert_tokens_to_ids(m.begin): m for m in modalities.values() if m.decoder and m.begin}
    never = [tokenizer.convert_tokens_to_ids(m.placeholder) for m in modalities.values() if m.placeholder]
    never += [own for m in modalities.values() if m.decoder for own in m.decoder.own_ids]
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
            if told is not None:
                told(pieces[-1])
            continue
        if not pieces or pieces[-1].modality != "text":
            pieces.append(Piece("text", []))
        pieces[-1].ids.append(token)
        if told is not None:
            told(pieces[-1])
        conversation.write(token)
    return pieces


def _speak(
    model: PreTrainedModel,
    media: MediaModel,
    modalities: Mapping[str, Modality],
    ids: Sequence[int],
    items: Sequence[Item],
    most: int,
    sampling: Sampling,
) -> Piece:
    name, decoder = next((name, m.decoder) for name, m in modalities.items() if m.decoder is not None)
    batch = whole_batch(items, media.ports, model.device, model.dtype)
    embeddings = media.embed(torch.tensor(ids, device=model.device), batch)
    targets = decoder.speak(embeddings, most, sampling)
    return Piece(name, [], targets, decoder.render(targets))


def _produce(conversation: Conversation, modality: Modality, begin: int, tokenizer: Any, sampling: Sampling) -> Piece:
    decoder = modality.decoder
    assert decoder is not None
    targets = decoder.generate(conversation.write(begin), conversation.feed, sampling)
    if modality.end:
        conversation.write(tokenizer.convert_tokens_to_ids(modality.end))
    return Piece(modality.name, [], targets, decoder.render(targets))
