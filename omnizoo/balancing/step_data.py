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
    imbalance: dict[str, float]  # load of the busiest rank / mean load, for tokens and for each port
    # Since the start of the run: numbers of skipped rows, and of dropped or split samples.
    counters: dict[str, int] = field(default_factory=dict)
    bad_rows: Sequence[str] = ()  # messages about rows that were skipped in this step, from all ranks
    kto_baseline: "StepData | None" = None  # mismatched prompt-response pairs, for a forward pass without loss

    @property
    def tokens(self) -> int:
        """The number of tokens on all ranks, without dummy packs."""
        return self.totals.tokens
