"""`omnizoo train`: check the config and its layout, then train in this process or start the ranks.

torch is imported after the checks, so config errors appear quickly.
"""

import argparse

from omnizoo.config.errors import TrainingError, UserError
from omnizoo.config.load import load_config
from omnizoo.hub.resolve import as_overrides, resolve_names
from omnizoo.launch.launcher import launch, watch_launcher
from omnizoo.launch.output import continue_without_output
from omnizoo.launch.rank_failure import expected_failure, report_failure
from omnizoo.parallel.layout import check_step, plan_layout
from omnizoo.parallel.rendezvous import place_in_world, tasks_without_srun
from omnizoo.reporting.start_clock import StartClock

MAX_RANKS = 1024  # maximum number of ranks on one machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo train`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=int,
        help="number of ranks to start on this machine (default: 1); not allowed if torchrun or Slurm starts the "
        "ranks, as in `torchrun --nnodes ... -m omnizoo train CONFIG`",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="timing details, the same as --log.verbose true")


def run(args: argparse.Namespace) -> int:
    """Check the config and the layout, then train in this process or in `--nproc` ranks. Returns the exit code."""
    continue_without_output()
    clock = StartClock(whole_process=True)
    rank_and_world = place_in_world()
    overrides = args.overrides
    if args.verbose:
        overrides = [*overrides, "--log.verbose", "true"]
    config = load_config(args.config, overrides)
    started_ranks = rank_and_world[1] if rank_and_world else None
    check_nproc(args.nproc, started_ranks)
    num_tasks = tasks_without_srun()
    if args.nproc is None and num_tasks:
        raise UserError(
            f"Slurm: the job has {num_tasks} tasks, but the batch script runs `omnizoo train` once. Use `srun omnizoo "
            "train ...` to start all tasks, or --nproc N to start N ranks on this node."
        )
    world = started_ranks or args.nproc or 1
    layout = plan_layout(config.parallel, world)
    check_step(layout, config.train)
    if started_ranks is None:  # otherwise one rank of each node downloads, after the ranks have connected
        config, pins = resolve_names(config)
        if world > 1:
            return launch(["train", args.config, *overrides, *as_overrides(pins)], world)

    watch_launcher()
    clock.done("config")
    from omnizoo.training.loop import train

    clock.done("imports")
    try:
        return train(config, report_failure, clock=clock).exit_code
    except (MemoryError, RuntimeError, OSError, UnicodeEncodeError) as error:
        if isinstance(error, TrainingError):
            raise
        rank = rank_and_world[0] if rank_and_world else 0
        message = expected_failure(rank, error)
        if message is None:
            raise
        raise TrainingError(message) from error


def check_nproc(nproc: int | None, started_ranks: int | None = None) -> None:
    """Check `--nproc`. It must not be set if torchrun or Slurm has started the ranks.

    Args:
        nproc: Value of `--nproc`; None if it is not set.
        started_ranks: Number of ranks that torchrun or Slurm has started; None if neither of them is used.

    Raises:
        UserError: If the value is out of range, or the ranks are already started.
    """
    if nproc is None:
        return
    if not 1 <= nproc <= MAX_RANKS:
        raise UserError(f"--nproc: {nproc}; expected 1 to {MAX_RANKS} ranks to start on this machine")
    if started_ranks is not None:
        raise UserError(
            f"--nproc: {nproc}, but torchrun or Slurm has already started {started_ranks} ranks. Remove --nproc, or "
            "unset RANK, WORLD_SIZE and SLURM_NTASKS."
        )
