"""The console: one live line on a terminal, plain lines elsewhere, every figure in its place at any width."""

import io
import math
import re

import pytest
from rich.console import Console

from omnizoo.reporting.progress import Progress, show_start

STEP = {
    "loss": 2.34512, "grad_norm": 1.234, "lr": 2.97e-4, "tokens_per_sec": 12345.6, "mfu": 0.451, "memory_gb": 1.234,
    "bad_steps": 0,
}  # fmt: skip
EVERYTHING = ["2.3451", "grad 1.23", "lr 0.0003", "12,346 tok/s", "1.23 GB", "eta"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int, **options: object) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, force_interactive=True, **options)


def log_file(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=False)


def live_line(progress: Progress, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(progress, end="")
    return console.file.getvalue().rstrip("\n")


@pytest.mark.parametrize(("width", "mfu"), [(120, 0.451), (100, 0.451), (80, None)])
def test_live_line_shows_all_metrics_and_bar_within_width(width, mfu):
    clock = Clock()
    progress = Progress(1000, console=terminal(width), clock=clock)
    for step in range(1, 251):
        clock.now += 0.5
        progress.update(step, {**STEP, "mfu": mfu})
    line = live_line(progress, width)
    assert len(line) <= width
    assert "\n" not in line
    assert line.startswith("250/1000")
    for part in [*EVERYTHING, "25%", "━━━━━", *(["45% mfu"] if mfu else [])]:
        assert part in line


def test_bar_keeps_its_width_while_metrics_change():
    clock = Clock()
    progress = Progress(1000, console=terminal(100), clock=clock)
    widths = []
    for step in range(1, 300):
        clock.now += 0.5
        progress.update(step, {**STEP, "loss": 2.3451 if step % 2 else 2.3})
        widths.append(live_line(progress, 100).count("━"))
    assert len(set(widths[2:])) == 1


@pytest.mark.parametrize("width", range(20, 130, 7))
def test_live_line_keeps_step_and_loss_at_any_width(width):
    progress = Progress(100_000, console=terminal(width))
    progress.update(12_345, {**STEP, "bad_steps": 3})
    line = live_line(progress, width)
    assert len(line) <= width
    assert "\n" not in line
    assert "12345/100000" in line
    if width >= 40:
        assert "loss 2.3451" in line
        assert "3 skipped" in line


def test_log_file_gets_plain_line_every_n_steps():
    console = log_file()
    flushed = []
    console.file.flush = lambda: flushed.append(len(console.file.getvalue()))
    with Progress(11, every=5, console=console) as progress:
        for step in range(1, 12):
            progress.update(step, STEP)
            if step in (1, 5, 10, 11):
                assert flushed[-1] == len(console.file.getvalue())
    lines = console.file.getvalue().splitlines()
    assert [re.match(r"step (\d+)/11", line)[1] for line in lines] == ["1", "5", "10", "11"]
    assert all(part in line for line in lines for part in EVERYTHING)
    assert "\x1b" not in console.file.getvalue()
    assert "\r" not in console.file.getvalue()


def test_messages_are_printed_verbatim():
    for console in (log_file(), terminal(80, color_system=None)):
        with Progress(3, console=console) as progress:
            progress.say("skipped [red]row[/red] 7 of data/[a].jsonl")
            progress.update(1, STEP)
        assert "skipped [red]row[/red] 7 of data/[a].jsonl\n" in console.file.getvalue()


def test_held_out_metrics_get_separate_line():
    console = log_file()
    with Progress(10, every=100, console=console) as progress:
        progress.update(1, STEP)
        progress.update(4, {**STEP, "eval/loss": 2.5, "eval/chat": 1.25})
    assert console.file.getvalue().splitlines()[-1] == "step 4  eval/loss 2.5000  eval/chat 1.2500"


def test_eta_follows_recent_speed_without_startup_and_stalls():
    clock = Clock()
    progress = Progress(1000, start_step=100, console=log_file(), clock=clock)
    clock.now += 300  # start-up: compile, first read
    progress.update(101, STEP)
    assert progress.remaining() is None
    for step in range(102, 201):
        clock.now += 600 if step == 150 else 2
        progress.update(step, STEP)
    assert progress.remaining() == pytest.approx(800 * 2)
    clock.now += 1.5  # it counts down between steps
    assert progress.remaining() == pytest.approx(800 * 2 - 1.5)
    for step in range(201, 301):
        clock.now += 3
        progress.update(step, STEP)
    assert progress.remaining() == pytest.approx(700 * 3)


def test_eta_includes_regular_slow_steps():
    clock = Clock()
    progress = Progress(2000, console=log_file(), clock=clock, every=5000)
    for step in range(1, 1001):
        clock.now += 11 if step % 10 == 0 else 1
        progress.update(step, STEP)
    assert progress.remaining() == pytest.approx(1000 * 2, rel=0.12)


def test_nan_loss_is_shown_and_missing_values_are_omitted():
    progress = Progress(10, console=log_file())
    progress.update(3, {"loss": math.nan, "grad_norm": math.inf, "mfu": None})
    line = live_line(progress, 80)
    assert "loss nan" in line
    assert "grad inf" in line
    assert "mfu" not in line


def test_ascii_terminal_gets_ascii_bar():
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80, force_terminal=True)
    with Progress(4, console=console) as progress:
        progress.update(2, {"loss": 1.0})
    console.file.flush()
    assert b"---" in console.file.buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_start_table_shows_all_facts_at_any_width(width):
    console = log_file(width)
    rows = {"model": "Qwen3 [tiny]", "parameters": "58.3 M", "run folder": "runs/" + "very-long/" * 15}
    show_start(console, rows)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    text = re.sub(r"[│\s]", "", "".join(lines))
    assert all(name.replace(" ", "") in text and value.replace(" ", "") in text for name, value in rows.items())
