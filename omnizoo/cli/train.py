"""`omnizoo train`: check the config and its layout, then train in this process or start the ranks that do.

Nothing here imports torch before the config is known to be good.
"""

import os

from omnizoo.cli.failure import foreseen, report_failure
from omnizoo.cli.launch import LAUNCHER_FD, launch, watch_launcher
from omnizoo.config import reference
from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import micro_batches, plan_layout
from omnizoo.parallel.rendezvous import place_in_world, tasks_without_srun
from omnizoo.training.start_clock import StartClock

MOST_RANKS = 1024  # on one machine
USAGE = """\
omnizoo train CONFIG [--section.key value ...] [--nproc N]

CONFIG is a YAML file. Every key below can stand in it or on the command line, which wins.
Values are YAML; relative paths are relative to the working directory.

--nproc N starts N processes on this machine. For several machines leave it out and run under
Slurm or torchrun: `torchrun --nnodes ... -m omnizoo train CONFIG`."""


def train(path: str, overrides: list[str], nproc: int | None) -> int:
    clock = StartClock(whole_process=True)
    place = place_in_world()
    # Who started us has said what there is to say of it, or the first rank does.
    config = load_config(path, overrides, notices=LAUNCHER_FD not in os.environ and not (place and place[0]))
    started = place[1] if place else None
    if nproc is not None and not 1 <= nproc <= MOST_RANKS:
        raise UserError(f"--nproc is {nproc}; expected the number of processes to start here, 1 to {MOST_RANKS}")
    if nproc is not None and started is not None:
        raise UserError(
            f"--nproc {nproc}: torchrun or Slurm has started this process as one of {started} already; "
            "leave --nproc out (or unset RANK, WORLD_SIZE and SLURM_NTASKS)"
        )
    if nproc is None and (tasks := tasks_without_srun()):
        raise UserError(
            f"this is the batch script of a Slurm job of {tasks} tasks: `srun omnizoo train ...` starts all of them "
            "(--nproc N would start N processes on this node)"
        )
    world = started or nproc or 1
    micro_batches(plan_layout(config.parallel, world), config.train.global_batch, config.train.micro_batch)
    if started is None and world > 1:
        return launch(["train", path, *overrides], world)
    watch_launcher()
    clock.done("config")
    from omnizoo.training.run import train as train_here

    clock.done("imports")
    try:
        return train_here(config, report_failure, clock=clock)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, TrainingError) and (line := foreseen(place[0] if place else 0, error)):
            raise TrainingError(line) from error
        raise


def print_help() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(Text(USAGE))
    keys = reference.keys()
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
