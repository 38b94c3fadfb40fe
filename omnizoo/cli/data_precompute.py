"""`omnizoo data precompute`: encode the media and prompts of a run once, and write them as shards.

The command may be killed and started again at any moment. It then continues after the last complete shard.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from omnizoo.cli.train import check_nproc
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.hub.resolve import as_overrides, resolve_names
from omnizoo.launch.launcher import launch, watch_launcher
from omnizoo.parallel.rendezvous import place_in_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omnizoo.training.precompute.run import Job

SHARD_ROWS = 64
POLL_SECONDS = 1.0  # time between two looks at the shards of other processes


def run(args: argparse.Namespace) -> int:
    """Encode all rows, in this process or in `--nproc` processes. Returns the exit code."""
    if args.out is None:
        raise UserError("--out: not set. Pass the folder to write, such as --out precomputed.")
    shard_rows = SHARD_ROWS if args.shard_rows is None else args.shard_rows
    if not 1 <= shard_rows <= 100_000:
        raise UserError(f"--shard-rows: {shard_rows}; expected 1 to 100000 rows")
    place = place_in_world()
    check_nproc(args.nproc, place[1] if place else None)
    config = load_config(args.config, args.overrides)
    config, pins = resolve_names(config)
    if args.nproc is not None and args.nproc > 1:
        command = ["data", "precompute", args.config, "--out", str(args.out), "--shard-rows", str(shard_rows)]
        return launch([*command, *args.overrides, *as_overrides(pins)], args.nproc)

    watch_launcher()
    from transformers.utils import logging as transformers_logging

    from omnizoo.ops.device import pick_device
    from omnizoo.training.precompute.plan import plan_jobs
    from omnizoo.training.precompute.run import Share, run_stages

    transformers_logging.disable_progress_bar()
    rank, world, local_rank = place or (0, 1, 0)
    stages, jobs = plan_jobs(config, args.out, shard_rows)
    console = Console(stderr=True)
    with progress_bar(jobs, len(stages), console, is_shown=rank == 0) as advance:
        run_stages(stages, jobs, Share(rank, world, pick_device(local_rank)), advance)
    are_finished = [job.folder.finish() for job in jobs]
    if all(are_finished):
        report(jobs)
    return 0


@contextmanager
def progress_bar(
    jobs: "Sequence[Job]", num_stages: int, console: Console, is_shown: bool
) -> "Iterator[Callable[[int], None]]":
    """Context manager that shows how many rows are encoded, by all processes. Yields a function to call after a row."""
    if not is_shown or not console.is_terminal:
        yield lambda rows: None
        return
    total = num_stages * sum(job.folder.num_rows for job in jobs)
    columns: list[Any] = [TextColumn("precompute"), BarColumn(), MofNCompleteColumn(), TextColumn("rows x stages")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=total)
        counted_at = 0.0

        def advance(rows: int) -> None:
            nonlocal counted_at
            if time.monotonic() - counted_at >= POLL_SECONDS:
                counted_at = time.monotonic()
                progress.update(task, completed=sum(job.folder.count_done() for job in jobs))
            else:
                progress.advance(task, rows)

        yield advance
        progress.update(task, completed=sum(job.folder.count_done() for job in jobs))


def report(jobs: "Sequence[Job]") -> None:
    """Print what was written."""
    from omnizoo.data.sources.precomputed import PrecomputedIndex

    for job in jobs:
        index = PrecomputedIndex.read(job.folder.path)
        num_bad = job.folder.num_rows - index.num_rows
        skipped = f", {num_bad:,} bad rows left out" if num_bad else ""
        gigabytes = sum(entry["bytes"] for entry in index.files.values()) / 1e9
        print(f"written: {job.folder.path} ({index.num_rows:,} rows, {gigabytes:.2f} GB{skipped})")
