"""The console of a run: a table of what is about to happen, then one line that shows how it goes.

On a terminal the line is live; in a file or a CI log it is a plain line every `log.every` steps, without control codes.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from omnizoo.training.metrics import Metrics

BAR_MIN, BAR_MAX = 5, 30
# Where the line is too long for the terminal, these go, the least needed first.
DROPPED = ("elapsed", "bar", "mfu", "memory_gb", "grad_norm", "lr", "percent", "tokens_per_sec")


def show_start(console: Console, rows: Mapping[str, str]) -> None:
    """What is about to be trained, how and where; a row per fact, values may have several lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.print(Panel(table, title="[bold]OmniZoo", title_align="left", border_style="cyan", expand=False))


class Progress:
    """`with Progress(total, start) as progress`: `update` after each step, `say` for anything else worth a line."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._live = Live(self, console=self._console, refresh_per_second=4) if self._console.is_interactive else None
        self._total, self._every, self._clock = total_steps, every, clock
        self._step, self._first = start_step, start_step + 1
        self._metrics: Metrics = {}
        self._started = self._stepped = clock()
        self._durations: deque[float] = deque(maxlen=64)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Metrics) -> None:
        now = self._clock()
        if step > self._first:  # the first step of a process also warms up kernels, loaders and caches
            self._durations.append((now - self._stepped) / (step - self._step))
        self._step, self._stepped, self._metrics = step, now, metrics
        if self._live is None and (step % self._every == 0 or step in (self._first, self._total)):
            parts = {name: part for name, part in self._parts().items() if name != "bar"}
            self._print(Text("step ").append_text(Text("  ").join(parts.values())))
        held_out = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if k.startswith("eval/") and v is not None)
        if held_out:
            self.say(f"step {step}  {held_out}")

    def say(self, message: str) -> None:
        """Print a message; on a terminal it appears above the live line."""
        self._print(Text(message))

    def remaining(self) -> float | None:
        """Seconds to go at the recent pace, without the longest step seen: a stalled disk, a suspended machine."""
        if not self._durations:
            return None
        counted = sorted(self._durations)[:-1] or list(self._durations)
        ahead = (self._total - self._step) * sum(counted) / len(counted)
        return max(0.0, ahead - (self._clock() - self._stepped))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def _parts(self) -> dict[str, Text]:
        """The parts of the line in the order they are read; a value that is not known has no part."""
        m, skipped, remaining = self._metrics, self._metrics.get("bad_steps") or 0, self.remaining()
        eta = "--" if remaining is None else _duration(remaining)
        parts = {
            "step": Text(f"{self._step}/{self._total}", "bold"),
            "percent": Text(f"{100 * self._step // self._total}%"),
            "bar": Text("-" * BAR_MIN),
            "loss": _labelled("loss", m.get("loss"), 4, "bold cyan"),
            "grad_norm": _labelled("grad", m.get("grad_norm"), 2),
            "lr": _labelled("lr", m.get("lr"), 0),
            "tokens_per_sec": _unit(m.get("tokens_per_sec"), _si, " tok/s"),
            "mfu": _unit(m.get("mfu"), lambda share: f"{100 * share:.0f}%", " mfu"),
            "memory_gb": _unit(m.get("memory_gb"), lambda gb: f"{gb:.3g}", " GB"),
            "bad_steps": Text(f"{skipped:.0f} skipped", "bold red") if skipped else Text(),
            "elapsed": Text(_duration(self._clock() - self._started), "dim"),
            "eta": Text.assemble(("eta ", "dim"), (eta, "green")) if m else Text("starting", "dim"),
        }
        return {name: part for name, part in parts.items() if part}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield _fit(self._parts(), self._step / self._total, options.max_width, "-" if options.ascii_only else "━")


def _fit(parts: dict[str, Text], share: float, width: int, stroke: str) -> Text:
    """One line of at most `width` columns: first the gaps narrow, then parts go; what is left over is the bar's."""

    def length(gap: int) -> int:
        return sum(len(part) + gap for part in parts.values()) - gap

    gap = 2 if length(2) <= width else 1
    for name in DROPPED:
        if length(gap) > width:
            parts.pop(name, None)
    if "bar" in parts:
        columns = min(BAR_MIN + width - length(gap), BAR_MAX)
        done = round(share * columns)
        parts["bar"] = Text.assemble((stroke * done, "cyan"), (stroke * (columns - done), "dim"))
    line = Text(" " * gap, no_wrap=True, overflow="crop").join(parts.values())
    line.truncate(width)
    return line


def _labelled(label: str, value: float | None, digits: int, style: str = "") -> Text:
    if value is None:
        return Text()
    return Text.assemble((f"{label} ", "dim"), (_number(value, digits), style if math.isfinite(value) else "bold red"))


def _unit(value: float | None, form: Callable[[float], str], unit: str) -> Text:
    return Text() if value is None else Text.assemble(form(value), (unit, "dim"))


def _number(value: float, digits: int) -> str:
    if value == 0 or not math.isfinite(value) or 10**-digits <= abs(value) < 1000:
        return f"{value:.{digits}f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{m:02d}m" if hours else f"{m}:{s:02d}"
