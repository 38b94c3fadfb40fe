"""Metrics of a run by name, their smoothed trend, and downsampling of long curves."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


class History:
    """Metrics of a run, with one value per step; NaN for steps without a value."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.steps = [int(row["step"]) for row in rows]
        self.keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "step"]
        self._rows = rows

    def values(self, key: str) -> list[float]:
        """Return the value of a metric for each step; NaN for steps without a value."""
        return [math.nan if row.get(key) is None else float(row[key]) for row in self._rows]

    def finite(self, key: str) -> list[float]:
        """Return the finite values of a metric, in the order of the steps."""
        return [value for value in self.values(key) if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        """Return the value of a metric at the last step that has one; None if no step has one."""
        return next((float(row[key]) for row in reversed(self._rows) if row.get(key) is not None), None)

    def lowest(self, key: str) -> tuple[float | None, int]:
        """Return the lowest finite value of a metric and its step; (None, 0) if there is none."""
        values = zip(self.values(key), self.steps, strict=True)
        return min(((value, step) for value, step in values if math.isfinite(value)), default=(None, 0))

    def steps_above(self, key: str, limit: float) -> list[int]:
        """Return the steps whose value of a metric is above `limit`."""
        return [step for step, value in zip(self.steps, self.values(key), strict=True) if value > limit]

    def seconds(self) -> float:
        """Return the total time of all steps in seconds."""
        pairs = zip(self.values("tokens"), self.values("tokens_per_sec"), strict=True)
        return sum(tokens / rate for tokens, rate in pairs if rate > 0 and math.isfinite(tokens / rate))

    def bad_steps(self) -> set[int]:
        """Return the steps whose update was skipped.

        At these steps, the loss or the gradient norm is not finite, or the counter `bad_steps` increases.
        """
        bad = set()
        previous = 0.0
        for step, row in zip(self.steps, self._rows, strict=True):
            count = row.get("bad_steps") or 0.0
            losses_and_norms = [row[key] for key in ("loss", "grad_norm") if row.get(key) is not None]
            if count > previous or not all(map(math.isfinite, losses_and_norms)):
                bad.add(step)
            previous = count
        return bad


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average of values in both directions, so it is not delayed.

    Args:
        values: The values. NaN and infinity are ignored.
        window: Number of steps over which the weights decay to 1/e in each direction.
    """
    decay = 1 - 1 / window
    left = _decayed_sums(values, decay)
    right = reversed(_decayed_sums(reversed(values), decay))
    means = []
    for value, (left_sum, left_weight), (right_sum, right_weight) in zip(values, left, right, strict=True):
        total = left_sum + right_sum
        weight = left_weight + right_weight
        if math.isfinite(value):
            total += value
            weight += 1
        means.append(total / weight if weight else math.nan)
    return means


def _decayed_sums(values: Iterable[float], decay: float) -> list[tuple[float, float]]:
    """Return, for each value, the weighted sum of the values before it and the sum of their weights."""
    total = weight = 0.0
    sums = []
    for value in values:
        sums.append((total, weight))
        if math.isfinite(value):
            total += value
            weight += 1
        total *= decay
        weight *= decay
    return sums


def downsample(values: Sequence[float], buckets: int) -> list[int]:
    """Return the indices of the values to draw, so that a long curve keeps its peaks and gaps.

    The values are divided into buckets of equal length. The result contains both ends of the curve, and the minimum,
    the maximum and one non-finite value of each bucket.

    Args:
        values: The values of a curve.
        buckets: Number of buckets. A curve with at most twice as many values is drawn completely.
    """
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [i for i in indices if math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        kept.update([i for i in indices if not math.isfinite(values[i])][:1])
    return sorted(kept)
