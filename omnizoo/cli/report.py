"""`omnizoo report`: write the report page of a run, or a page that compares several runs."""

import argparse
from pathlib import Path

from omnizoo.cli.parser import path_argument
from omnizoo.config.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo report`."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=path_argument,
        help="run folder (`log.dir`); several run folders are compared",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=path_argument,
        help="HTML file to write (default: RUN/report.html, or comparison.html for several runs)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page of one run, or the comparison of several runs. Returns 0."""
    from omnizoo.reporting.report import write_comparison, write_report
    from omnizoo.reporting.run_folder import RunFolder

    folders = [RunFolder(path) for path in args.runs]
    for folder in folders:
        if not folder.metrics.exists():
            raise UserError(f"{folder.root}: {folder.metrics.name} not found. Pass a run folder (log.dir).")
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out: {args.out} is a folder. Pass the name of an HTML file to write.")
    try:
        if len(folders) == 1:
            written = write_report(folders[0], out=args.out)
        else:
            written = write_comparison(folders, args.out or Path("comparison.html"))
    except OSError as error:
        raise UserError(f"--out: cannot write {error.filename or args.out}: {error.strerror}") from None
    print(f"written: {written}")
    return 0
