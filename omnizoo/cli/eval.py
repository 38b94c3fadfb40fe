"""`omnizoo eval`: evaluate a checkpoint, in this process or in several ranks."""

import argparse
from pathlib import Path

from omnizoo.cli.parser import allow_code, path_argument
from omnizoo.cli.train import check_nproc
from omnizoo.config.errors import UserError
from omnizoo.hub.resolve import as_overrides, resolve_names
from omnizoo.launch.launcher import launch, watch_launcher
from omnizoo.launch.rank_failure import report_failure
from omnizoo.parallel.layout import plan_layout
from omnizoo.parallel.rendezvous import place_in_world
from omnizoo.training.evaluation.run_config import load_evaluation_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo eval`."""
    parser.add_argument("config", metavar="CONFIG|RUN", type=path_argument, help="YAML file or run folder")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=path_argument,
        help="checkpoint or run folder (default: the newest checkpoint of the run; without one, the initial weights)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="evaluation of the best checkpoint of the run (`checkpoint.best`) instead of the newest",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=path_argument, help="output folder (default: eval/step_N in the run folder)"
    )
    parser.add_argument("--nproc", metavar="N", type=int, help="number of ranks to start on this machine (default: 1)")
    allow_code(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate the config or run folder in `args`, and return the exit code."""
    target: Path = args.config
    if args.checkpoint is not None and args.best:
        raise UserError("--best: --checkpoint is also set. Remove one of them.")
    rank_and_world = place_in_world()
    config, run_folder = load_evaluation_config(
        target, args.overrides, allow_code=args.allow_code, trust_remote_code=args.trust_remote_code
    )
    started_ranks = rank_and_world[1] if rank_and_world else None
    check_nproc(args.nproc, started_ranks)
    world = started_ranks or args.nproc or 1
    plan_layout(config.parallel, world)
    if rank_and_world is None:
        config, pins = resolve_names(config)
        if world > 1:
            return launch(["eval", str(target), *args.overrides, *as_overrides(pins), *rank_flags(args)], world)

    watch_launcher()
    from omnizoo.training.evaluation.evaluate_checkpoint import evaluate_run

    folder = args.checkpoint or run_folder
    return evaluate_run(config, folder, args.best, args.out, report_failure, is_printed=True).exit_code


def rank_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of `args` that the launcher passes to each rank."""
    flags = [f"--allow-code={name}" for name in args.allow_code]
    if args.checkpoint is not None:
        flags.append(f"--checkpoint={args.checkpoint}")
    if args.out is not None:
        flags.append(f"--out={args.out}")
    if args.best:
        flags.append("--best")
    if args.trust_remote_code:
        flags.append("--trust-remote-code")
    return flags
