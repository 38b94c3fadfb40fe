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
    imbalance: dict[str, float]  # cost on the busiest rank / mean cost, for packs (key `tokens`) and for each port
    # Counters since the start of the run, such as the numbers of skipped rows and of dropped samples.
    counters: dict[str, int] = field(default_factory=dict)
    bad_rows: Sequence[str] = ()  # messages from all ranks about rows that were skipped in this step
    kto_baseline: "StepData | None" = None  # mismatched prompt-response pairs; excluded from training
    totals_by_source: dict[int, StepTotals] = field(default_factory=dict)  # keyed by index in data.sources

    @property
    def tokens(self) -> int:
        """Number of tokens on all ranks, without dummy packs."""
        return self.totals.tokens
