"""`omnizoo new`: write a first config for a model and data, or the files of a new modality."""

import argparse

from omnizoo.cli.new.config import new_config
from omnizoo.cli.new.modality import new_modality
from omnizoo.cli.parser import path_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_FOLDER", help="Hugging Face folder; or the word `modality`")
    parser.add_argument("data", metavar="DATA", help="file or folder of rows; after `modality`: its name")
    parser.add_argument(
        "--nproc", metavar="N", type=int, help="processes that will train on this machine (default: one per device)"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=path_argument,
        help="file of the config (default: first.yaml), or folder of the modality (default: the current one)",
    )


def run(args: argparse.Namespace) -> int:
    return new_modality(args) if args.model == "modality" else new_config(args)
