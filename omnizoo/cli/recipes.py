"""`omnizoo recipes`: list the model families that have a recipe, and the test of each supported capability."""

import argparse
import logging
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnizoo.cli.parser import path_argument
from omnizoo.cli.render_file import render_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo recipes`."""
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        type=path_argument,
        help="Markdown file to write the list to, instead of printing it (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the list of families, or write it to the file in `--markdown`. Returns 0."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(logging.CRITICAL)  # warnings about default configs are irrelevant here
    if args.markdown is not None:
        write_markdown(args.markdown)
    else:
        print_tables()
    return 0


def write_markdown(path: Path) -> None:
    """Write the list of families as Markdown tables."""
    from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, REFUSED, families

    text = render_file(
        "recipes.md.jinja",
        families=families(),
        capabilities=CAPABILITIES,
        refused=dict(sorted(REFUSED.items())),
        no_media=dict(sorted(NO_MEDIA.items())),
    )
    path.write_text(text, encoding="utf-8")


def print_tables() -> None:
    """Print the list of families as tables."""
    from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, OMNI_PROOF, PROOF, REFUSED, families

    columns = ("family", "models", "kind", "lines of recipe", "shared lines", *CAPABILITIES)
    table = Table(*columns, title="recipes", title_justify="left")
    for entry in families():
        marks = ["yes" if entry.proof(capability) else "" for capability in CAPABILITIES]
        kind = "MoE" if entry.is_moe else "dense"
        if entry.is_omni:
            kind = f"omni, {kind}"
        table.add_row(entry.family, entry.recipe.about, kind, str(entry.lines), str(entry.shared_lines), *marks)
    console = Console()
    console.print(table)
    layouts = ", ".join(f"{name}: {layout}" for name, layout in CAPABILITIES.items())
    console.print(f"Every `yes` is a test with 4 ranks ({layouts}):", markup=False)
    console.print(f"{PROOF}[family]; omni models: {OMNI_PROOF}[family].", markup=False, soft_wrap=True)
    console.print("The recipe of any other family is inferred from its model; `omnizoo verify` checks it for a config.")
    for title, reasons in {
        "families that cannot be trained": REFUSED,
        "families trained on text only": NO_MEDIA,
    }.items():
        table = Table("family", "reason", title=title, title_justify="left")
        for family, reason in sorted(reasons.items()):
            table.add_row(family, reason)
        console.print(table)
