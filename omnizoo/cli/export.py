"""`omnizoo export`: write a checkpoint as a Hugging Face folder."""

import argparse

from omnizoo.cli.parser import allow_code, path_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo export`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=path_argument, help="checkpoint or run folder")
    parser.add_argument(
        "out", metavar="OUT_DIR", type=path_argument, help="new folder to write, in the format of `from_pretrained`"
    )
    parser.add_argument(
        "--ema", action="store_true", help="export of the moving average of the weights (`optimizer.ema`)"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="export of the best checkpoint of a run folder (`checkpoint.best`) instead of the newest",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="export of the full model, with the adapter of the run merged into the base model",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the exported weights (default: the dtype of the initial model, or of the run)",
    )
    allow_code(parser)


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint and return 0."""
    from transformers.utils import logging as transformers_logging

    from omnizoo.checkpoint.export_run import export

    transformers_logging.disable_progress_bar()  # "Writing model shards" would break the output
    exported = export(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        ema=args.ema,
        best=args.best,
        merge=args.merge,
        allow_code=args.allow_code,
        trust_remote_code=args.trust_remote_code,
    )
    for line in exported.lines():
        print(line)
    return 0
