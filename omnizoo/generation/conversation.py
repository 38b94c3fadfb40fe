"""Continue one or several conversations, with one token of each conversation per forward pass.

Prompts are processed one at a time, so a prompt with media runs as in training. The KV caches of the prompts are then
joined for the following tokens, with padding on the left.
"""

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from omnizoo.generation.kv_cache import can_join, join_caches, resized, row_of
from omnizoo.modalities.item import MediaItem
from omnizoo.models.interfaces.lm_head import last_hidden_state
from omnizoo.models.interfaces.recurrent import has_states
from omnizoo.models.media.batch import prompt_batch
from omnizoo.models.media.media_model import MediaModel

log = logging.getLogger(__name__)
EMBEDDING_ID = 0  # stored as the token id of a position whose input is an embedding; only the number of ids matters
# Maximum difference between logits computed jointly and separately, relative to the largest logit. Rounding errors
# cause differences of about 1e-6 in fp32 and 1e-2 in bf16.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class Conversation:
    """State of a generation: the KV cache, and the logits and hidden state of the last position."""

    def __init__(self, model: PreTrainedModel, media: MediaModel) -> None:
        self.model = model
        self.media = media
        self.cache = DynamicCache(config=media.language.config)  # unused while the conversation is in a joined batch
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
        return self._run(self.media.language, [EMBEDDING_ID], inputs_embeds=embedding[None, None])

    def positions(self, count: int) -> torch.Tensor | None:
        """Return the position ids `[ids per token, 1, count]` of the last `count` tokens.

        None if the position id of each token is its index, as is the default of transformers.
        """
        if self.media.positions is None:
            return None
        positions = self.media.positions(np.array(self.ids, np.int32), self.items)[:, None, -count:]
        return torch.from_numpy(positions).to(self.model.device)

    def _run(self, module: PreTrainedModel, ids: Sequence[int], **inputs: Any) -> torch.Tensor:
        """Run `module` on the next positions, and store the logits and hidden state of the last one."""
        self.ids += ids
        positions = self.positions(len(ids))
        if positions is not None:
            inputs["position_ids"] = positions
        logits, hidden = run_last(module, self.media, self.cache, inputs)
        self.logits, self.hidden = logits[0], hidden[0]
        return self.hidden


def run_last(
    module: PreTrainedModel, media: MediaModel, cache: DynamicCache, inputs: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `module` on the next positions of all rows.

    Returns:
        The logits `[rows, vocabulary]` and hidden states `[rows, width]` of the last position.
    """
    hidden_states: list[torch.Tensor] = []
    last = torch.tensor([-1], device=module.device)
    with last_hidden_state(media.language, hidden_states.append):
        out = module(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=last)
    return out.logits[:, -1], hidden_states[0][:, -1]


@dataclass
class JointSupport:
    """Result of the checks whether a model can continue several conversations in one forward pass."""

    is_checked: bool = False  # whether logits were compared with separate forward passes
    obstacle: str | None = None  # why the model cannot do this; None if no check has failed

    def refuse(self, model: PreTrainedModel, obstacle: str) -> None:
        """Store and log the reason why the model cannot continue several conversations in one forward pass."""
        self.obstacle = obstacle
        log.warning("%s responds to one prompt at a time, because %s.", type(model).__name__, obstacle)


class ConversationBatch:
    """Conversations that are continued together, one token each per step.

    The results of the first step with padding are compared with the results of separate forward passes. If they differ,
    because the model's code ignores the mask or the positions of padded rows, conversations are continued one at a
    time.
    """

    def __init__(self, model: PreTrainedModel, media: MediaModel, support: JointSupport) -> None:
        self.model = model
        self.media = media
        self.support = support
        self.rows: list[Conversation] = []  # the conversations in the joined cache
        self.cache: DynamicCache | None = None  # joined cache of `rows`; None if there are none

    @torch.no_grad()
    def write(self, rows: Sequence[Conversation], tokens: Sequence[int]) -> None:
        """Run the model on one more token of each of the conversations `rows`."""
        if len(rows) < 2 or not self._can_join(rows):
            self.separate(self.rows)
            for row, token in zip(rows, tokens, strict=True):
                row.write(token)
            return
        token_of = dict(zip(map(id, rows), tokens, strict=True))
        self.separate([row for row in self.rows if id(row) not in token_of])
        self._join([row for row in rows if row not in self.rows])
        self._write_joined([token_of[id(row)] for row in self.rows])

    def separate(self, rows: Sequence[Conversation]) -> None:
        """Move conversations from the joined cache to separate caches."""
        leaving = [row for row in rows if row in self.rows]
        for row in leaving:
            assert self.cache is not None
            row.cache = row_of(self.cache, self.rows.index(row), len(row.ids))
        self.drop(leaving)

    def drop(self, rows: Sequence[Conversation]) -> None:
        """Remove finished conversations from the joined cache. Their part of the cache is deleted."""
        kept = [i for i, row in enumerate(self.rows) if row not in rows]
        if len(kept) == len(self.rows):
            return
        assert self.cache is not None
        self.rows = [self.rows[i] for i in kept]
        length = max((len(row.ids) for row in self.rows), default=0)
        self.cache = resized(self.cache, length, kept) if kept else None

    def _can_join(self, rows: Sequence[Conversation]) -> bool:
        """Whether the caches of conversations can be joined. If not, the reason is logged once."""
        if self.support.obstacle is not None:
            return False
        parameters = signature(type(self.media.language).forward).parameters
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        if has_states(self.media.language) or not all(can_join(row.cache) for row in rows):
            self.support.refuse(self.model, "its layers have recurrent states")
        elif not takes_any and not {"attention_mask", "position_ids"} <= parameters.keys():
            self.support.refuse(self.model, "its code accepts no attention mask or no position ids")
        return self.support.obstacle is None

    def _join(self, rows: Sequence[Conversation]) -> None:
        """Add conversations to the joined cache."""
        if not rows:
            return
        caches = [] if self.cache is None else [self.cache]
        self.rows = [*self.rows, *rows]
        self.cache = join_caches([*caches, *(row.cache for row in rows)], max(len(row.ids) for row in self.rows))
        for row in rows:
            row.cache = DynamicCache(config=self.media.language.config)  # free the memory

    def _write_joined(self, tokens: Sequence[int]) -> None:
        """Run the model on one more token of each conversation in the joined cache."""
        assert self.cache is not None
        lengths = [len(row.ids) + 1 for row in self.rows]
        has_padding = min(lengths) < max(lengths)
        references = self._write_separately(tokens) if has_padding and not self.support.is_checked else []

        for row, token in zip(self.rows, tokens, strict=True):
            row.ids.append(token)
        logits, hidden = run_last(self.model, self.media, self.cache, self._inputs(tokens, lengths))
        for i, row in enumerate(self.rows):
            row.logits, row.hidden = logits[i], hidden[i]
        if references:
            self._compare(references)

    def _inputs(self, tokens: Sequence[int], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the inputs of a step: the tokens `[rows, 1]`, their positions, and the mask of padded positions."""
        device = self.model.device
        counts = torch.tensor(lengths, device=device)[:, None]
        offsets = torch.arange(max(lengths), 0, -1, device=device)  # number of positions from here to the end
        positions = [row.positions(1) for row in self.rows]
        position_ids = counts - 1
        if self.media.positions is not None:
            position_ids = torch.cat([part for part in positions if part is not None], dim=1)
        return {
            "input_ids": torch.tensor(tokens, device=device)[:, None],
            "position_ids": position_ids,
            "attention_mask": (offsets <= counts).long(),
        }

    def _write_separately(self, tokens: Sequence[int]) -> list[Conversation]:
        """Copy each conversation, and run the model on its token in a separate forward pass. Return the copies."""
        assert self.cache is not None
        copies = []
        for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            copied = copy(row)
            copied.ids = list(row.ids)
            copied.cache = row_of(self.cache, i, len(row.ids))
            copied.write(token)
            copies.append(copied)
        return copies

    def _compare(self, references: Sequence[Conversation]) -> None:
        """Compare the logits with the logits of separate forward passes.

        If they differ, the conversations continue from the separate results, and joint forward passes are disabled.
        """
        self.support.is_checked = True
        tolerance = TOLERANCE.get(self.model.dtype, 0.1)
        expected = torch.stack([reference.logits for reference in references]).double()
        actual = torch.stack([row.logits for row in self.rows]).double()
        difference = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if difference <= tolerance or not torch.isfinite(expected).all():
            return
        self.support.refuse(
            self.model,
            f"its code does not keep padded rows apart (logits differ by {difference:.1g} of the largest one)",
        )
        for row, reference in zip(self.rows, references, strict=True):
            row.cache, row.logits, row.hidden = reference.cache, reference.logits, reference.hidden
        self.rows, self.cache = [], None
