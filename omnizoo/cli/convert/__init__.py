"""`omnizoo convert FILE`: write the config of another trainer as a config of OmniZoo.

Each key of the file becomes a key, or a comment that says why it has no counterpart.
"""

import argparse
import sys
from pathlib import Path

from omnizoo.cli.convert.conversion import convert
from omnizoo.cli.convert.render import render
from omnizoo.cli.convert.source_file import read_source
from omnizoo.cli.parser import path_argument
from omnizoo.config.errors import UserError, printable
from omnizoo.config.foreign.lookup import TRAINERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo convert`."""
    parser.add_argument(
        "file", metavar="FILE", type=path_argument, help="YAML or JSON file, or a shell script that starts the trainer"
    )
    parser.add_argument(
        "--from", dest="trainer", choices=TRAINERS, help="trainer that the file belongs to (default: detected)"
    )
    parser.add_argument("--out", metavar="FILE", type=path_argument, help="file for the config (default: printed)")


def run(args: argparse.Namespace) -> int:
    """Convert the file, and print the keys that were not converted. Returns 0."""
    out: Path | None = args.out
    if out is not None and out.exists():
        raise UserError(f"--out: {out} already exists. Delete it, or choose another file.")
    source = read_source(args.file, args.trainer)
    converted = convert(source)
    text = render(converted)
    if out is None:
        print(text, end="")
    else:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out: cannot write {out}: {error.strerror}") from None
    for line in converted.notices:
        print(printable(line), file=sys.stderr)
    if out is not None:
        print(f"written: {out}. Read its comments, then run: omnizoo train {out}", file=sys.stderr)
    return 0
