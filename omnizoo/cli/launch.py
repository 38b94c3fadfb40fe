"""`omnizoo launch`: print a job file that runs `omnizoo train` on several machines of a cluster.

`omnizoo launch my.yaml --slurm --nodes 4 > job.sh`
"""

import argparse
import re
import shlex
from pathlib import Path

from omnizoo.cli.render_file import render_file
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import check_step, plan_layout

MAX_COUNT = 100_000  # maximum number of nodes, of ranks per node, and of cores per rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo launch`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", dest="kind", action="store_const", const="slurm", help="job file for `sbatch`")
    kind.add_argument(
        "--kubernetes", dest="kind", action="store_const", const="kubernetes", help="job file for `kubectl apply`"
    )
    parser.add_argument("--nodes", metavar="N", type=int, default=1, help="number of machines (default: 1)")
    parser.add_argument(
        "--nproc", metavar="N", type=int, default=8, help="number of ranks per machine, one for each GPU (default: 8)"
    )
    parser.add_argument("--cpus", metavar="N", type=int, default=8, help="number of CPU cores per rank (default: 8)")
    parser.add_argument("--no-gpus", dest="gpus", action="store_false", help="job for machines without accelerators")
    parser.add_argument(
        "--time", metavar="H:M:S", default="24:00:00", help="time limit of a Slurm job (default: 24:00:00)"
    )
    parser.add_argument("--partition", metavar="NAME", help="Slurm partition (default: set by the cluster)")
    parser.add_argument("--account", metavar="NAME", help="Slurm account (default: set by the cluster)")
    parser.add_argument(
        "--image",
        metavar="NAME",
        default="REGISTRY/omnizoo:latest",
        help="container with omnizoo, for Kubernetes (default: REGISTRY/omnizoo:latest)",
    )


def run(args: argparse.Namespace) -> int:
    """Check the config and the layout, then print the job file. Returns 0.

    The checks run now, so errors appear before the job is queued.
    """
    check_arguments(args)
    config = load_config(args.config, args.overrides)
    layout = plan_layout(config.parallel, args.nodes * args.nproc)
    check_step(layout, config.train)
    name = re.sub(r"[^a-z0-9]+", "-", Path(config.log.dir).name.lower()).strip("-")[:50] or "train"
    command = shlex.join(["omnizoo", "train", args.config, *args.overrides])
    print(render_file(f"{args.kind}.jinja", job=args, name=name, command=command), end="")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that argparse does not check."""
    for flag in ("nodes", "nproc", "cpus"):
        value = getattr(args, flag)
        if not 1 <= value <= MAX_COUNT:
            raise UserError(f"--{flag}: {value}; expected a number from 1 to {MAX_COUNT}")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", args.time):
        raise UserError(f"--time: {args.time!r}; expected hours:minutes:seconds, or days-hours:minutes:seconds")
    for flag, text in (("--partition", args.partition), ("--account", args.account), ("--image", args.image)):
        if text is not None and not re.fullmatch(r"[\w.:/@,+-]+", text):
            raise UserError(f"{flag}: {text!r} is not a valid name; expected letters, digits and . : / @ , + - _")
