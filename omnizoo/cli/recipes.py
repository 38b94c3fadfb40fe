"""`omnizoo recipes`: the zoo as a table, every mark with the test behind it."""

from rich.console import Console
from rich.table import Table

from omnizoo.recipes.zoo import CAPABILITIES, PROOF, families


def recipes() -> int:
    table = Table(title="recipes", title_justify="left")
    for column in ("family", "models", "kind", "lines", *CAPABILITIES):
        table.add_column(column)
    for entry in families():
        marks = ["yes" if entry.proof(capability) else "" for capability in CAPABILITIES]
        table.add_row(entry.family, entry.recipe.about, "MoE" if entry.is_moe else "dense", str(entry.lines), *marks)
    console = Console()
    console.print(table)
    layouts = ", ".join(f"{name}: {layout}" for name, layout in CAPABILITIES.items())
    console.print(f"Every mark is {PROOF}[family] at 4 ranks ({layouts}).", markup=False)
    console.print("A family without a recipe gets one that infers everything; `omnizoo verify` proves it for a config.")
    return 0
