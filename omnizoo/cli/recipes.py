"""`omnizoo recipes`: list the model families with a recipe, and the test for each supported capability."""

import argparse
import logging

from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has none."""


def run(args: argparse.Namespace) -> int:
    from transformers.utils import logging as transformers_logging

    from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, OMNI_PROOF, PROOF, REFUSED, families

    transformers_logging.set_verbosity(logging.CRITICAL)  # warnings about default configs are irrelevant here
    columns = ("family", "models", "kind", "own lines", "shared lines", *CAPABILITIES)
    table = Table(*columns, title="recipes", title_justify="left")
    for entry in families():
        marks = ["yes" if entry.proof(capability) else "" for capability in CAPABILITIES]
        kind = ("omni, " if entry.is_omni else "") + ("MoE" if entry.is_moe else "dense")
        lines = (str(entry.lines), str(entry.shared_lines))
        table.add_row(entry.family, entry.recipe.about, kind, *lines, *marks)
    console = Console()
    console.print(table)
    layouts = ", ".join(f"{name}: {layout}" for name, layout in CAPABILITIES.items())
    console.print(f"Every mark is a test at 4 ranks ({layouts}):", markup=False)
    console.print(f"{PROOF}[family], of omni models {OMNI_PROOF}[family].", markup=False, soft_wrap=True)
    console.print("A family without a recipe gets one that infers everything; `omnizoo verify` proves it for a config.")
    for title, reasons in {"refused, because": REFUSED, "media not fed, because": NO_MEDIA}.items():
        listed = Table("family", "reason", title=title, title_justify="left")
        for family, reason in sorted(reasons.items()):
            listed.add_row(family, reason)
        console.print(listed)
    return 0
