"""What the talker of a published Qwen omni model hears of a conversation: which tokens these are, where each goes in
the talker's own sequence, and the positions there. The loader knows it all. What differs from model to model is in
qwen3_talker.py and qwen2_5_talker.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.modalities.base import Follower, Ids, Inputs, Item
from omnizoo.modalities.item import BadMedia

HEADER = 3  # tokens before an answer's text: begin, role, line break
PAD, BOS, EOS = -1, -2, -3  # in the place of a row: embeddings that mean so


@dataclass(frozen=True)
class Turns:
    """The token ids by which turns of a conversation are told apart; None: the tokenizer has no such token."""

    start: int | None
    end: int | None
    user: int | None
    assistant: int | None


@dataclass(frozen=True)
class Heard:
    """What of a conversation the talker gets to see."""

    spans: list[tuple[int, int]]  # of tokens: what was said before, then the answer
    before: Ids  # of what was said before
    items: list[Item]  # in what was said before
    text: int  # tokens of the answer's text, the last ones of the spans

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.spans)


class Hearing(Follower):
    config: Any  # of the whole model
    settings: Any  # of its talker
    turns: Turns  # as the published chat template writes them

    def heard(
        self, ids: Ids, items: Sequence[Item], turns: list[tuple[int, int, int]], start: int, stop: int, what: str
    ) -> Heard:
        """Of `turns` (first token, end, role), of which the answer begins at `start` and ends at `stop`."""
        raise NotImplementedError

    def prefix(self, text: int) -> list[int]:
        """The rows between what was said before and the first frame; `text` is the first one of the answer."""
        raise NotImplementedError

    def positions(self, heard: Heard, more: int) -> torch.Tensor:
        """`[3, L]` of what was said before and `more` places."""
        raise NotImplementedError

    def hear(self, ids: Ids, items: Sequence[Item], answer: int, answers: int | None, what: str) -> Heard:
        """`answers`: how many there should be; None: any number."""
        starts = places_of(ids, self.turns.start)
        ends = [*starts[1:].tolist(), len(ids)]
        roles = [int(ids[start + 1]) if start + 1 < len(ids) else -1 for start in starts]
        turns = list(zip(starts.tolist(), ends, roles, strict=True))
        said = [(start, end) for start, end, role in turns if role == self.turns.assistant]
        if not said or (answers is not None and len(said) != answers):
            count = "the messages" if answers is None else f"{answers} messages"
            raise BadMedia(
                f"{what}: {count} of the assistant are {len(said)} turns of it in what the chat template "
                "writes; speech needs a template that begins each as the published one does"
            )
        start, end = said[answer]
        stops = places_of(ids[start + HEADER : end], self.turns.end)
        stop = start + HEADER + int(stops[0]) if len(stops) else end
        if stop <= start + HEADER:
            raise BadMedia(f"{what} is an answer without text: there is nothing to say aloud")
        return self.heard(ids, items, turns, start, stop, what)

    def notes(self, heard: Heard, frames: int) -> Inputs:
        """Of each place of the talker's sequence the row that it gets, and its position."""
        text = np.arange(heard.rows - heard.text, heard.rows)
        trailing = np.full(frames, PAD)
        spoken = np.append(text[1:], EOS)[:frames]
        trailing[: len(spoken)] = spoken
        before = [*range(len(heard.before)), *self.prefix(int(text[0]))]
        positions = self.positions(heard, len(before) - len(heard.before) + frames).double()
        return {
            "source": torch.from_numpy(np.concatenate([before, trailing])).long(),
            # As whole numbers: floats come in the precision of the computation.
            "positions": positions.contiguous().view(torch.int64),
        }


def places_of(ids: Ids, token: int | None) -> npt.NDArray[np.int64]:
    return np.flatnonzero(ids == (-1 if token is None else token))
