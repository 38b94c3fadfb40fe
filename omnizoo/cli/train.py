"""`omnizoo train`: check the config and its layout, then train in this process or start the ranks.

torch is imported after the checks, so config errors appear quickly.
"""

import argparse
from typing import NoReturn

from omnizoo.config import reference
from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.launch.launcher import launch, watch_launcher
from omnizoo.launch.rank_failure import foreseen, report_failure
from omnizoo.parallel.layout import micro_batches, plan_layout
from omnizoo.parallel.rendezvous import place_in_world, tasks_without_srun
from omnizoo.reporting.start_clock import StartClock

MOST_RANKS = 1024  # maximum number of ranks on one machine
USAGE = """\
omnizoo train CONFIG [--section.key value ...] [--nproc N]

CONFIG is a YAML file. Every key below can stand in it or on the command line, which wins.
Values are YAML; relative paths are relative to the working directory.

--nproc N starts N processes on this machine. For several machines leave it out and run under
Slurm or torchrun: `torchrun --nnodes ... -m omnizoo train CONFIG`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action=TrainHelp, nargs=0)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--nproc", metavar="N", type=int)


class TrainHelp(argparse.Action):
    """Help action that prints every config key, read from the schema."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print_help()
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Check the config and the layout, then train in this process or in `--nproc` ranks. Returns the exit code."""
    clock = StartClock(whole_process=True)
    place = place_in_world()
    config = load_config(args.config, args.overrides)
    started = place[1] if place else None
    check_nproc(args.nproc, started)
    if args.nproc is None and (tasks := tasks_without_srun()):
        raise UserError(
            f"this is the batch script of a Slurm job of {tasks} tasks: `srun omnizoo train ...` starts all of "
            "them (--nproc N would start N processes on this node)"
        )
    world = started or args.nproc or 1
    micro_batches(plan_layout(config.parallel, world), config.train.packs_per_step, config.train.micro_batch)
    if started is None and world > 1:
        return launch(["train", args.config, *args.overrides], world)

    watch_launcher()
    clock.done("config")
    from omnizoo.training.loop import train

    clock.done("imports")
    try:
        return train(config, report_failure, clock=clock)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, TrainingError) and (line := foreseen(place[0] if place else 0, error)):
            raise TrainingError(line) from error
        raise


def check_nproc(nproc: int | None, started: int | None = None) -> None:
    """Check `--nproc`, which must not be set if torchrun or Slurm has `started` the ranks."""
    if nproc is None:
        return
    if not 1 <= nproc <= MOST_RANKS:
        raise UserError(f"--nproc is {nproc}; expected the number of processes to start here, 1 to {MOST_RANKS}")
    if started is not None:
        raise UserError(
            f"--nproc {nproc}: torchrun or Slurm has started this process as one of {started} already; "
            "leave --nproc out (or unset RANK, WORLD_SIZE and SLURM_NTASKS)"
        )


def print_help() -> None:
    """Print the usage and a table of keys for each section."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(Text(USAGE))
    keys = reference.all_keys()
    for section, about in reference.sections().items():
        console.print(Text.assemble("\n", (section, "bold"), f": {about}"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for key in keys:
            if key.key.startswith(section + "."):
                facts = f"{key.type}; {'required' if key.default == 'required' else f'default {key.default}'}"
                table.add_row(f"  --{key.key}", Text.assemble(key.description, "\n", (facts, "dim")))
        console.print(table)
