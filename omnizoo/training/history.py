"""The metrics of a run by name, and what is needed to draw many of them: their trend, and fewer points."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


class History:
    """The metrics by name, one value per step; NaN where a step has none."""

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

    def seconds(self) -> float:
        pairs = zip(self.values("tokens"), self.values("tokens_per_sec"), strict=True)
        return sum(tokens / rate for tokens, rate in pairs if rate > 0 and math.isfinite(tokens / rate))

    def resumes(self, starts: Iterable[dict[str, Any]]) -> set[int]:
        """Steps after which the run was started again."""
        first = self.steps[0] if self.steps else 0
        return {step for start in starts if isinstance(step := start.get("step"), int) and step >= max(1, first)}

    def bad_steps(self) -> set[int]:
        """Skipped steps: a loss or gradient that is not finite, or the count of them went up."""
        bad, before = set(), 0.0
        for step, row in zip(self.steps, self._rows, strict=True):
            count = row.get("bad_steps") or 0.0
            broken = any(row.get(key) is not None and not math.isfinite(row[key]) for key in ("loss", "grad_norm"))
            if broken or count > before:
                bad.add(step)
            before = count
        return bad


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Mean of the neighbours on both sides, their weights fading exponentially: no lag; NaN does not count."""
    fade = 1 - 1 / window

    def behind(ordered: Iterable[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        sums = []
        for value in ordered:
            sums.append((total, weight))  # before the value itself, which both directions would count
            if math.isfinite(value):
                total, weight = total + value, weight + 1
            total, weight = total * fade, weight * fade
        return sums

    means = []
    for value, (left, a), (right, b) in zip(values, behind(values), reversed(behind(reversed(values))), strict=True):
        own, c = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)
        means.append((left + own + right) / (a + b + c) if a + b + c else math.nan)
    return means


def downsample(values: Sequence[float], buckets: int) -> list[int]:
    """Indices to draw: both ends, and of every bucket its lowest and highest value and one gap, if it has any."""
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    kept = {0, count - 1}
    for bucket in range(buckets):
        indices = range(bucket * count // buckets, (bucket + 1) * count // buckets)
        finite = [i for i in indices if math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(indices):
            kept.add(next(i for i in indices if not math.isfinite(values[i])))
    return sorted(kept)
