"""Inputs of the talkers of Qwen omni models, computed in the data loader.

They are the tokens of a conversation that a talker receives, the position of each in the talker's sequence, and the
rotary positions. qwen3_talker.py and qwen2_5_talker.py have the differences between models.
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
PAD, BOS, EOS = -1, -2, -3  # special embeddings, instead of the index of a row


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
    text: int  # number of text tokens of the response, which are last in the spans

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.spans)


class TalkerFollower(Follower):
    config: Any  # config of the model
    settings: Any  # config of the talker
    turns: TurnTokens  # turn tokens of the model's chat template
    sizes: Sequence[int]  # sizes of the codebooks
    prefix: ClassVar[Sequence[int]]  # special embeddings between the context and the first token of the response

    def spans_before(self, turns: list[tuple[int, int, int]], start: int) -> list[tuple[int, int]]:
        """Return the spans that the talker reads of `turns` (first token, end, role) before the response at `start`."""
        raise NotImplementedError

    def check_item(self, item: MediaItem, what: str) -> None:
        """Raise `BadMedia` if the talker does not support a media item of the conversation."""

    @property
    def position_model(self) -> Any:
        """The model whose `get_rope_index` returns the positions of the talker's sequence."""
        raise NotImplementedError

    def hear(self, ids: Ids, items: Sequence[MediaItem], answer: int, answers: int | None, what: str) -> TalkerContext:
        """Return the part of a conversation that the talker receives for one response.

        Args:
            answer: Index of the response among the assistant's turns.
            answers: Expected number of responses; None accepts any number.
            what: Name of the response in error messages.

        Raises:
            BadMedia: If the response is not found, has no text or follows no prompt.
        """
        starts = placeholders_of(ids, self.turns.start)
        ends = [*starts[1:].tolist(), len(ids)]
        roles = [int(ids[start + 1]) if start + 1 < len(ids) else -1 for start in starts]
        turns = list(zip(starts.tolist(), ends, roles, strict=True))
        responses = [(start, end) for start, end, role in turns if role == self.turns.assistant]
        if not responses or (answers is not None and len(responses) != answers):
            count = "the messages" if answers is None else f"{answers} messages"
            raise BadMedia(
                f"{what}: {count} of the assistant are {len(responses)} turns of it in what the chat template "
                "writes; speech needs a template that begins each as the published one does"
            )
        start, end = responses[answer]
        stops = placeholders_of(ids[start + HEADER : end], self.turns.end)
        stop = start + HEADER + int(stops[0]) if len(stops) else end
        if stop <= start + HEADER:
            raise BadMedia(f"{what} is an answer without text: there is nothing to say aloud")
        said = self.spans_before(turns, start)
        if not said:
            raise BadMedia(f"{what} is an answer to nothing: no message of the user is before it")
        within = [
            item
            for item in items
            if item.spans and any(first <= item.spans[0][0] < first + count for first, count in said)
        ]
        for item in within:
            self.check_item(item, what)
        before = np.concatenate([*(ids[first : first + count] for first, count in said), ids[start : start + HEADER]])
        return TalkerContext([*said, (start, stop - start)], before, within, stop - start - HEADER)

    def notes(self, heard: TalkerContext, frames: int) -> Inputs:
        """Return the source row and the rotary positions of each position of the talker's sequence."""
        text = np.arange(heard.rows - heard.text, heard.rows)
        trailing = np.full(frames, PAD)
        spoken = np.append(text[1:], EOS)[:frames]
        trailing[: len(spoken)] = spoken
        source = np.concatenate([np.arange(len(heard.before)), self.prefix, text[:1], trailing])
        ids = np.append(heard.before, np.full(len(source) - len(heard.before), PAD, np.int32))
        positions = torch.from_numpy(thinker_positions(self.position_model, ids, heard.items))[1:].double()
        return {
            "source": torch.from_numpy(source).long(),
            # The bits of fp64 as integers: floats would be cast to the dtype of the model.
            "positions": positions.contiguous().view(torch.int64),
        }

    def dummy_input(self) -> Inputs:
        heard = TalkerContext([(0, HEADER + 1)], np.full(HEADER, PAD, np.int32), [], 1)
        codes = torch.zeros(1, len(self.sizes), dtype=torch.int64)
        return {"codes": codes, "voice": torch.zeros(1, dtype=torch.int64), **self.notes(heard, 1)}


def placeholders_of(ids: Ids, token: int | None) -> npt.NDArray[np.int64]:
    return np.flatnonzero(ids == (-1 if token is None else token))
