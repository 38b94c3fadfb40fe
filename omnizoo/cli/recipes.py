"""`omnizoo recipes`: list the model families with a recipe, and the test for each supported capability."""

import argparse
import logging

from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has none."""


def run(args: argparse.Namespace) -> int:
    """Print the table of families, and the families that are not supported. Returns 0."""
    from transformers.utils import logging as transformers_logging

    from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, OMNI_PROOF, PROOF, REFUSED, families

    transformers_logging.set_verbosity(logging.CRITICAL)  # warnings about default configs are irrelevant here
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
    return 0
