"""Progress of a run in a notebook: the progress line and the loss curves below the cell, updated in place."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from omnizoo.reporting.charts import format_value
from omnizoo.reporting.history import downsample
from omnizoo.reporting.pages import render
from omnizoo.reporting.progress import Progress
from omnizoo.reporting.run_folder import Metrics

SECONDS_BETWEEN_UPDATES = 1.0
WIDTH, HEIGHT = 640, 160  # size of the chart in pixels
MAX_POINTS = 400  # maximum number of points of a curve
CURVES = {"loss": "loss", "eval/loss": "held-out loss"}  # metrics that are drawn, and their names in the legend


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook. In a kernel, IPython is already imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def open_progress(total_steps: int, start_step: int, every: int, rows: Sequence[Mapping[str, Any]]) -> Progress:
    """Return the progress display that fits this process: below the cell of a notebook, or on the console.

    Args:
        total_steps: Number of steps of the run.
        start_step: Step of the checkpoint that the run resumes from.
        every: Number of steps between lines, if the output is neither a notebook nor a terminal.
        rows: Metrics of earlier steps, for the curves.
    """
    if is_notebook():
        return NotebookProgress(total_steps, start_step, rows)
    return Progress(total_steps, start_step, every)


class NotebookProgress(Progress):
    """Context manager that shows the steps of a run below a cell. It has the methods of `Progress`."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        rows: Sequence[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the display.

        Args:
            total_steps: Number of steps of the run.
            start_step: Step of the checkpoint that the run resumes from.
            rows: Metrics of earlier steps.
            clock: Returns the time in seconds.
        """
        super().__init__(total_steps, start_step, every=total_steps + 1, console=Console(quiet=True), clock=clock)
        self._points: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
        self._messages: list[str] = []
        self._shown_at = -math.inf
        self._handle: Any = None
        for row in rows:
            self._add(int(row["step"]), row)

    def __enter__(self) -> "NotebookProgress":
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(self._render()), display_id=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._show()

    def update(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step, at most once per second."""
        self._add(step, metrics)
        super().update(step, metrics)
        if self._clock() - self._shown_at >= SECONDS_BETWEEN_UPDATES:
            self._show()

    def _add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the losses of a step to the curves."""
        for name, points in self._points.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                points.append((step, value))

    def _print(self, text: Text) -> None:
        """Show a message below the curves."""
        self._messages.append(text.plain)
        self._show()

    def _show(self) -> None:
        """Replace the content of the display."""
        if self._handle is not None:
            self._shown_at = self._clock()
            self._handle.update(self._html(self._render()))

    def _render(self) -> str:
        """Return the progress line, the curves and the messages as HTML. All text is escaped."""
        line = "step " + "  ".join(part.plain for part in self._parts().values())
        return render("notebook.html", line=line, messages=self._messages, **loss_curves(self._points))


def loss_curves(points: Mapping[str, Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Return the template values for the curves: coordinates in pixels, and labels of the axes.

    Args:
        points: (step, value) pairs of each metric in `CURVES`.
    """
    drawn = {}
    for name, curve in points.items():
        kept = downsample([value for _, value in curve], MAX_POINTS // 2)
        drawn[name] = [curve[i] for i in kept]
    steps = [step for curve in drawn.values() for step, _ in curve]
    values = [value for curve in drawn.values() for _, value in curve]
    if len(steps) < 2:
        return {"curves": {}, "lowest": "", "highest": "", "first": 0, "last": 0, "width": WIDTH, "height": HEIGHT}
    lowest, highest = min(values), max(values)
    first, last = min(steps), max(steps)

    curves = {}
    for name, curve in drawn.items():
        coordinates = []
        for step, value in curve:
            x = WIDTH * (step - first) / max(1, last - first)
            y = HEIGHT * (highest - value) / ((highest - lowest) or 1.0)
            coordinates.append(f"{x:.1f},{y:.1f}")
        if coordinates:
            curves[CURVES[name]] = " ".join(coordinates)
    return {
        "curves": curves,
        "lowest": format_value(lowest),
        "highest": format_value(highest),
        "first": first,
        "last": last,
        "width": WIDTH,
        "height": HEIGHT,
    }
