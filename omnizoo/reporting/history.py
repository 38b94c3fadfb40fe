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
        return [math.nan if row.get(key) is None else float(row[key]) for row in self._rows]

    def finite(self, key: str) -> list[float]:
        return [value for value in self.values(key) if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        return next((float(row[key]) for row in reversed(self._rows) if row.get(key) is not None), None)

    def lowest(self, key: str) -> tuple[float | None, int]:
        """Return the lowest finite value and its step; (None, 0) if there is none."""
        values = zip(self.values(key), self.steps, strict=True)
        return min(((value, step) for value, step in values if math.isfinite(value)), default=(None, 0))

    def steps_above(self, key: str, limit: float) -> list[int]:
        """Return the steps whose value is above `limit`."""
        return [step for step, value in zip(self.steps, self.values(key), strict=True) if value > limit]

    def seconds(self) -> float:
        """Return the total time of all steps in seconds."""
        pairs = zip(self.values("tokens"), self.values("tokens_per_sec"), strict=True)
        return sum(tokens / rate for tokens, rate in pairs if rate > 0 and math.isfinite(tokens / rate))

    def bad_steps(self) -> set[int]:
        """Return the skipped steps: those with a non-finite loss or gradient norm, or that increased `bad_steps`."""
        bad = set()
        previous = 0.0
        for step, row in zip(self.steps, self._rows, strict=True):
            count = row.get("bad_steps") or 0.0
            checked = [row[key] for key in ("loss", "grad_norm") if row.get(key) is not None]
            if count > previous or not all(map(math.isfinite, checked)):
                bad.add(step)
            previous = count
        return bad


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return an exponential moving average in both directions, which does not lag. NaN is ignored."""
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
    """Return the indices to draw: both ends, and the minimum, the maximum and one missing value of each bucket."""
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
