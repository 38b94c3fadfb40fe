"""The HTML page of a plan: tables, and a chart of the memory of each part during a step."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnizoo.config.errors import UserError
from omnizoo.planning.memory_tracker import PARTS, Timeline
from omnizoo.reporting.charts import Chart, Curve
from omnizoo.reporting.pages import render

GIB = 2**30
POINTS = 600  # maximum number of points in the chart


def write_page(path: Path, name: str, plan: dict[str, Any], timeline: Timeline) -> None:
    """Write the HTML page of `plan`, the object that `--json` prints."""
    page = render(
        "plan.html",
        title=name,
        plan=plan,
        chart=_memory_chart(timeline, plan["device_memory_gb"] * (1 - plan["margin"])),
        buckets=POINTS,
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: cannot write {path}: {error.strerror}") from error


def _memory_chart(timeline: Timeline, allowed: float) -> Chart:
    """Return a chart of the memory by part.

    A long step is divided into `POINTS` sections. The chart shows the moment of each section with the most memory.

    Args:
        timeline: The memory during the step.
        allowed: Usable device memory in GiB, drawn as a horizontal line.
    """
    levels = timeline.bytes / GIB
    moments = _highest_moments(levels.sum(0))
    steps = list(range(len(moments)))
    curves = [Curve(part, steps, levels[number, moments].tolist(), "area", number) for number, part in enumerate(PARTS)]
    phases = [(min(int(np.searchsorted(moments, event)), len(steps) - 1), phase) for event, phase in timeline.phases]
    return Chart("Memory over the step, GiB", curves, wide=True, phases=phases, limit=allowed)


def _highest_moments(total: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Split the step into at most `POINTS` sections, and return the index of the maximum of each."""
    if len(total) <= POINTS:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), POINTS + 1).astype(int)
    return np.array([first + int(total[first:last].argmax()) for first, last in pairwise(edges)])
