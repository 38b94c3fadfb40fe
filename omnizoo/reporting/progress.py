"""Console output of a run: a table of facts at the start, then a progress line.

On a terminal, the line is updated in place. In a file or a CI log, a plain line is printed every `log.every` steps.
`rich.progress` is not used, because it cannot omit the least important columns on a narrow terminal.
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

from omnizoo.reporting.run_folder import Metrics

BAR_MIN, BAR_MAX = 5, 30  # minimum and maximum width of the bar, in columns
# Parts of the line that are omitted on a narrow terminal, least important first.
OPTIONAL = ("elapsed", "bar", "mfu", "memory_gb", "grad_norm", "lr", "percent", "tokens_per_sec")
FORMATS = {  # formats of metrics, in rich's markup
    "loss": "[dim]loss[/] [bold cyan]{:.5g}[/]",
    "grad_norm": "[dim]grad[/] {:.3g}",
    "lr": "[dim]lr[/] {:.2g}",
    "tokens_per_sec": "{:,.0f} [dim]tok/s[/]",
    "mfu": "{:.0%} [dim]mfu[/]",
    "memory_gb": "{:.3g} [dim]GB[/]",
}


def show_start(console: Console, rows: Mapping[str, str]) -> None:
    """Print a table that describes a run at its start.

    Args:
        console: The console to print on.
        rows: The name and value of each row.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.print(Panel(table, title="[bold]OmniZoo", title_align="left", border_style="cyan", expand=False))


class Progress:
    """Context manager for the steps of a run. Call `update` after each step, and `say` to print other lines."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        every: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the display.

        Args:
            total_steps: Number of steps of the run.
            start_step: Step of the checkpoint that the run resumes from.
            every: Number of steps between lines, if the output is not a terminal.
            console: The console to print on. Default: standard output.
            clock: Returns the time in seconds.
        """
        self._console = console or Console()
        self._live = Live(self, console=self._console, refresh_per_second=4) if self._console.is_interactive else None
        self._total = total_steps
        self._every = every
        self._clock = clock
        self._step = start_step
        self._first = start_step + 1
        self._metrics: Metrics = {}
        self._started = self._last_update = clock()
        self._durations: deque[float] = deque(maxlen=64)
        self._bar_width = BAR_MAX
        self._line_width = 0  # width of the terminal for which `_bar_width` was chosen

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step. Held-out metrics are printed on a separate line."""
        now = self._clock()
        if step > self._first:  # the first step is slower: it warms up kernels, loaders and caches
            self._durations.append((now - self._last_update) / (step - self._step))
        self._step = step
        self._last_update = now
        self._metrics = metrics
        if self._live is None and (step % self._every == 0 or step in (self._first, self._total)):
            self._print(Text("step ").append_text(Text("  ").join(self._parts().values())))
        held_out = {key: value for key, value in metrics.items() if key.startswith("eval/") and value is not None}
        if held_out:
            self.say("  ".join([f"step {step}", *(f"{key} {value:.4f}" for key, value in held_out.items())]))

    def say(self, message: str) -> None:
        """Print a message. On a terminal, it appears above the live line."""
        self._print(Text(message))

    def remaining(self) -> float | None:
        """Return the remaining seconds of the run, at the mean speed of recent steps; None before there is one.

        The slowest of these steps is ignored, because it may have waited for the disk.
        """
        if not self._durations:
            return None
        counted = sorted(self._durations)[:-1] or self._durations
        seconds = (self._total - self._step) * sum(counted) / len(counted)
        return max(0.0, seconds - (self._clock() - self._last_update))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield one line that fits the terminal.

        If the terminal is narrow, the gaps are narrowed first, then parts are omitted. The bar fills the remaining
        width. It does not grow again when the figures next to it get shorter, so the line does not flicker.
        """
        if options.max_width != self._line_width or not self._durations:
            self._line_width = options.max_width
            self._bar_width = BAR_MAX
        parts = self._parts(bar=Text("-" * BAR_MIN))

        def width(gap: int) -> int:
            return sum(len(part) + gap for part in parts.values()) - gap

        gap = 2 if width(2) <= options.max_width else 1
        for name in OPTIONAL:
            if width(gap) > options.max_width:
                parts.pop(name, None)
        if "bar" in parts:
            self._bar_width = min(BAR_MIN + options.max_width - width(gap), self._bar_width)
            num_done = self._bar_width * self._step // self._total
            stroke = "-" if options.ascii_only else "━"
            parts["bar"] = Text.assemble((stroke * num_done, "cyan"), (stroke * (self._bar_width - num_done), "dim"))
        line = Text(" " * gap, no_wrap=True, overflow="crop").join(parts.values())
        line.truncate(options.max_width)
        yield line

    def _print(self, text: Text) -> None:
        """Print a line at once."""
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def _parts(self, bar: Text | None = None) -> dict[str, Text]:
        """Return the parts of the line, in order. Unknown values are omitted."""
        parts = {
            "step": Text(f"{self._step}/{self._total}", "bold"),
            "percent": Text(f"{100 * self._step // self._total}%"),
        }
        if bar is not None:
            parts["bar"] = bar
        for name, form in FORMATS.items():
            value = self._metrics.get(name)
            if value is not None:
                text = Text.from_markup(form.format(value))
                parts[name] = text if math.isfinite(value) else Text(text.plain, "bold red")
        num_skipped = self._metrics.get("bad_steps")
        if num_skipped:
            parts["bad_steps"] = Text(f"{num_skipped:.0f} skipped", "bold red")
        parts["elapsed"] = Text(_duration(self._clock() - self._started), "dim")
        remaining = self.remaining()
        eta = "--" if remaining is None else _duration(remaining)
        parts["eta"] = Text.assemble(("eta ", "dim"), (eta, "green")) if self._metrics else Text("starting", "dim")
        return parts


def _duration(seconds: float) -> str:
    """Format a duration: `1h05m` or `5:07` (minutes and seconds)."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}h{minute:02d}m" if hours else f"{minute}:{second:02d}"
