"""The data of one step on one rank, after packs and media items have been assigned to ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from omnizoo.balancing.batch import Batch
from omnizoo.balancing.step_plan import StepTotals


@dataclass(frozen=True)
class StepData:
    """The micro-batches of this rank, and totals over all ranks."""

    micro_batches: Sequence[Batch]
    totals: StepTotals
    imbalance: dict[str, float]  # busiest rank / mean over ranks, for tokens and for each encoder and decoder
    counters: dict[str, int] = field(default_factory=dict)  # since the start: skipped rows, dropped or split samples
    bad_rows: Sequence[str] = ()  # messages about rows that were skipped in this step, from all ranks
    kto_baseline: "StepData | None" = None  # mismatched prompt-response pairs, for a forward pass without loss

    @property
    def tokens(self) -> int:
        """The number of tokens on all ranks, without dummy packs."""
        return self.totals.tokens
