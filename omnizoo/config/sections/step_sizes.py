"""Sizes of the optimizer steps of a run, in packs or samples. They depend only on the config."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class StepSizes:
    """The size of each step. Steps are counted from 0.

    During batch warmup, the size grows linearly from `start * size`, and is rounded to a whole number of at least 1.

    Attributes:
        size: Size of a step after the warmup.
        warmup_steps: Number of warmup steps.
        start: Size of the first warmup step, as a fraction of `size`.
    """

    size: int
    warmup_steps: int = 0
    start: float = 1.0

    def of_step(self, step: int) -> int:
        """Return the size of a step."""
        if step >= self.warmup_steps:
            return self.size
        share = self.start + (1 - self.start) * step / self.warmup_steps
        return max(1, round(share * self.size))

    @cached_property
    def _sums(self) -> Sequence[int]:
        """Sum of the sizes before each warmup step, and before the first step after the warmup."""
        return list(accumulate(map(self.of_step, range(self.warmup_steps)), initial=0))

    def before(self, step: int) -> int:
        """Return the sum of the sizes of all steps before `step`."""
        num_warmup = min(step, self.warmup_steps)
        return self._sums[num_warmup] + (step - num_warmup) * self.size

    def steps_for(self, total: int) -> int:
        """Return the minimum number of steps whose sizes add up to at least `total`."""
        rest = total - self._sums[-1]
        if rest > 0:
            return self.warmup_steps + -(-rest // self.size)
        return next(step for step, size in enumerate(self._sums) if size >= total)
