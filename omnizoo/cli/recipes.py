"""`omnizoo recipes`: the zoo as a table, every mark with the test behind it."""

import logging

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from omnizoo.recipes.zoo import CAPABILITIES, NO_MEDIA, OMNI_PROOF, PROOF, REFUSED, families


def recipes() -> int:
    transformers_logging.set_verbosity(logging.CRITICAL)  # its own default configs are not what is asked about
    table = Table(title="recipes", title_justify="left")
    for column in ("family", "models", "kind", "lines", *CAPABILITIES):
        table.add_column(column)
    for entry in families():
        marks = ["yes" if entry.proof(capability) else "" for capability in CAPABILITIES]
        kind = ("omni, " if entry.is_omni else "") + ("MoE" if entry.is_moe else "dense")
        table.add_row(entry.family, entry.recipe.about, kind, str(entry.lines), *marks)
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
