"""`omnizoo new`: write a first config for a model and its data, or the files of a new modality."""

import argparse

from omnizoo.cli.new.config import new_config
from omnizoo.cli.new.modality import new_modality
from omnizoo.cli.parser import path_argument
from omnizoo.config.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo new`."""
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face folder, ORG/NAME on the hub, or the word `modality`"
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="file or folder of rows, ORG/NAME of a dataset on the hub, or the name of the modality",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="number of ranks that train on this machine (default: one per device)"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=path_argument,
        help="file to write the config to (default: first.yaml), or folder to write the modality to (default: the "
        "working directory)",
    )


def run(args: argparse.Namespace) -> int:
    """Write a config, or the files of a modality. Returns 0."""
    if args.model == "modality":
        if args.overrides:
            raise UserError(f"new modality: {args.overrides[0]} is not used: a modality has no config. Remove it.")
        return new_modality(args)
    return new_config(args)
