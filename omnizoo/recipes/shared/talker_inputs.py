"""Inputs of the talkers of Qwen omni models, computed in the data loader.

These inputs are the tokens of a conversation that a talker receives, the position of each token in the talker's
sequence, and the rotary positions. qwen3_talker.py and qwen2_5_talker.py implement the differences between models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.modalities.base import Follower
from omnizoo.modalities.item import Ids, Inputs, MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.recipes.shared.qwen_audio import thinker_positions

HEADER = 3  # tokens before the text of a response: start of turn, role, line break
PAD, BOS, EOS = -1, -2, -3  # represent special embeddings in arrays whose other values are row indices


@dataclass(frozen=True)
class TurnTokens:
    """Token ids that mark the turns of a conversation; None if the tokenizer has no such token."""

    start: int | None
    end: int | None
    user: int | None
    assistant: int | None


@dataclass(frozen=True)
class TalkerContext:
    """The part of a conversation that the talker receives."""

    spans: list[tuple[int, int]]  # (first token, count): the context, then the response
    before: Ids  # token ids of the context and the header of the response
    items: list[MediaItem]  # media items in the context
    text: int  # number of text tokens of the response; they come last in the spans

    @property
    def rows(self) -> int:
        """Number of tokens in all spans."""
        return sum(count for _, count in self.spans)


class TalkerFollower(Follower):
    """Base class of talkers: finds the tokens that a talker receives and their positions."""

    config: Any  # config of the model
    settings: Any  # config of the talker
    turns: TurnTokens  # turn tokens of the model's chat template
    sizes: Sequence[int]  # sizes of the codebooks
    prefix: ClassVar[Sequence[int]]  # special embeddings between the context and the first token of the response

    def spans_before(self, turns: list[tuple[int, int, int]], start: int) -> list[tuple[int, int]]:
        """Return the spans that the talker reads from `turns` (first token, end, role) before the token `start`."""
        raise NotImplementedError

    def check_item(self, item: MediaItem, what: str) -> None:
        """Raise `BadMedia` if the talker does not support a media item of the conversation."""

    @property
    def position_model(self) -> Any:
        """The model whose `get_rope_index` returns the positions of the talker's sequence."""
        raise NotImplementedError

    def find_context(
        self, ids: Ids, items: Sequence[MediaItem], answer: int, answers: int | None, what: str
    ) -> TalkerContext:
        """Return the part of a conversation that the talker receives for one response.

        Args:
            answer: Index of the response among the assistant's turns.
            answers: Expected number of responses; None accepts any number.
            what: Name of the response in error messages.

        Raises:
            BadMedia: If the response is not found, has no text or follows no prompt.
        """
        turns = self.find_turns(ids)
        responses = [(start, end) for start, end, role in turns if role == self.turns.assistant]
        if not responses or (answers is not None and len(responses) != answers):
            expected = "at least 1" if answers is None else answers
            raise BadMedia(
                f"{what}: the chat template rendered {len(responses)} assistant turns; expected {expected}. "
                "Speech needs a template that begins each turn like the published one."
            )

        start, end = responses[answer]
        text_start = start + HEADER
        turn_ends = token_positions(ids[text_start:end], self.turns.end)
        stop = text_start + int(turn_ends[0]) if len(turn_ends) else end
        if stop <= text_start:
            raise BadMedia(f"{what}: the response has no text to speak")
        context_spans = self.spans_before(turns, start)
        if not context_spans:
            raise BadMedia(f"{what}: no user message precedes the response")

        context_items = [item for item in items if _starts_within(item, context_spans)]
        for item in context_items:
            self.check_item(item, what)
        context_ids = [ids[first : first + count] for first, count in context_spans]
        return TalkerContext(
            spans=[*context_spans, (start, stop - start)],
            before=np.concatenate([*context_ids, ids[start:text_start]]),
            items=context_items,
            text=stop - text_start,
        )

    def find_turns(self, ids: Ids) -> list[tuple[int, int, int]]:
        """Return (first token, end, token id of the role) of each turn of a conversation."""
        starts = token_positions(ids, self.turns.start).tolist()
        ends = [*starts[1:], len(ids)]
        roles = [int(ids[start + 1]) if start + 1 < len(ids) else -1 for start in starts]
        return list(zip(starts, ends, roles, strict=True))

    def notes(self, context: TalkerContext, frames: int) -> Inputs:
        """Return the source row and the rotary positions of each position of the talker's sequence."""
        text = np.arange(context.rows - context.text, context.rows)
        trailing = np.full(frames, PAD)
        spoken = np.append(text[1:], EOS)[:frames]
        trailing[: len(spoken)] = spoken
        source = np.concatenate([np.arange(len(context.before)), self.prefix, text[:1], trailing])
        padding = np.full(len(source) - len(context.before), PAD, np.int32)
        ids = np.append(context.before, padding)
        positions = torch.from_numpy(thinker_positions(self.position_model, ids, context.items))[1:].double()
        return {
            "source": torch.from_numpy(source).long(),
            # fp64 numbers, stored as integers with the same bits, because floats would be cast to the dtype of the
            # model
            "positions": positions.contiguous().view(torch.int64),
        }

    def dummy_input(self) -> Inputs:
        context = TalkerContext(spans=[(0, HEADER + 1)], before=np.full(HEADER, PAD, np.int32), items=[], text=1)
        codes = torch.zeros(1, len(self.sizes), dtype=torch.int64)
        return {"codes": codes, "voice": torch.zeros(1, dtype=torch.int64), **self.notes(context, 1)}


def _starts_within(item: MediaItem, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the first placeholder token of an item is in one of the spans."""
    if not item.spans:
        return False
    position = item.spans[0][0]
    return any(first <= position < first + count for first, count in spans)


def token_positions(ids: Ids, token: int | None) -> npt.NDArray[np.int64]:
    """Return the positions of a token id; empty if the id is None."""
    return np.flatnonzero(ids == (-1 if token is None else token))
