"""What routers chose in each step of a trial, and how many of these choices rounding could turn.

A router that chooses between scores that are equal but for rounding chooses differently on different layouts, and from
there on nothing has to agree. A token has such a tie where the last score that was chosen is above the next one by less
than two layouts may differ anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omnizoo.models.routing import RouterRecord
from omnizoo.training.routers import RouterStatistics


@dataclass(frozen=True)
class Chosen:
    """In one step, by layer in order of execution: how often each expert was chosen, and tokens with a tie."""

    loads: dict[str, list[float]]
    ties: dict[str, float]


class Choices(RouterStatistics):
    """Takes the place of an objective's statistics for one step. `below`: of a token's scores, by their norm."""

    def __init__(self, below: float) -> None:
        super().__init__()
        self.below = below
        self.ties: dict[str, float] = {}

    @torch.no_grad()
    def add(self, records: Sequence[RouterRecord]) -> None:
        super().add(records)
        for record in records:
            self.ties[record.layer] = self.ties.get(record.layer, 0.0) + tied(record, self.below)

    def chosen(self, total: Sequence[float]) -> Chosen:
        """`total` are `numbers` of all ranks."""
        layers, values = list(self.ties), iter(total)
        ties = {layer: next(values) for layer in layers}
        return Chosen({layer: [next(values) for _ in self._sums[layer][0]] for layer in layers}, ties)

    def numbers(self) -> list[float]:
        """Of this rank, to be summed over ranks."""
        loads = [load for layer in self.ties for load in self._sums[layer][0].tolist()]
        return [*self.ties.values(), *loads]


def tied(record: RouterRecord, below: float) -> int:
    """How many tokens have a tie. A choice that is not that of the highest scores (by groups of experts, with a bias)
    has none that could be seen here."""
    scores = record.logits.double()
    left_out = torch.ones_like(scores, dtype=torch.bool).scatter_(1, record.index, False)
    last = scores.masked_fill(left_out, float("inf")).amin(1)
    following = scores.masked_fill(~left_out, float("-inf")).amax(1)
    gap = last - following
    return int(((gap >= 0) & (gap <= below * scores.norm(dim=1))).sum())


def first_turned(steps: Sequence[Chosen], reference: Sequence[Chosen]) -> tuple[int, str] | None:
    """The step and the layer in which choices of two trials first differ, if that layer has a tie in `reference`."""
    for step, (own, other) in enumerate(zip(steps, reference, strict=True)):
        for layer, loads in other.loads.items():
            if own.loads.get(layer) != loads:
                return (step, layer) if other.ties[layer] else None
    return None
