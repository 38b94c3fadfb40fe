"""`omnizoo verify`: proves that every layout of the user's own config computes what one process does."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from omnizoo.cli.launch import launch
from omnizoo.config.load import load_config


def verify(
    path: str,
    overrides: list[str],
    world: int,
    layouts: str,
    precision: str,
    families: str | None = None,
) -> int:
    """0 if all layouts agree with one process, 1 if one does not."""
    config = load_config(path, overrides)
    from omnizoo.recipes.zoo import families as zoo
    from omnizoo.verification.prepare import VERDICTS, prepare, with_family

    names = [entry.family for entry in zoo()] if families == "all" else families.split(",") if families else []
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in names or [Path(path).stem]]
        tried = 0
        for folder in folders:
            own = with_family(config, folder.name) if names else config
            tried += len(prepare(own, world, layouts, precision, folder))
        command = (sys.executable, "-m", "omnizoo.verification.rank")
        code = launch([str(folder) for folder in folders], world, command=command)
        failed = passed = 0
        for folder in folders:
            lines = (folder / VERDICTS).read_text().splitlines() if (folder / VERDICTS).exists() else []
            verdicts = [json.loads(line) for line in lines]
            show(folder.name, verdicts, Console())
            passed += sum(verdict["passed"] for verdict in verdicts)
            failed += sum(not verdict["passed"] for verdict in verdicts)
    print(f"{passed} of {tried} layouts of {world} ranks agree with one process ({precision})")
    return code or int(failed > 0 or passed < tried)


def show(name: str, verdicts: list[dict[str, Any]], console: Console) -> None:
    console.width = console.width if console.is_terminal else 200
    table = Table(title=f"{name} against one process", title_justify="left")
    for column in ("layout", "loss", "worst gradient", "grad norm", "collectives per step", ""):
        table.add_column(column, overflow="fold")
    for v in verdicts:
        sent = ", ".join(f"{n} {name} {v['bytes'][name] / 2**20:.2f} MiB" for name, n in v["calls"].items())
        verdict = "[green]pass" if v["passed"] else "[bold red]FAIL"
        gradient = f"{v['gradient']:.0e} {v['worst']}"
        table.add_row(v["layout"], f"{v['loss']:.0e}", gradient, f"{v['grad_norm']:.0e}", sent, verdict)
    console.print(table)
    for v in verdicts:
        if not v["passed"]:
            console.print(f"[bold red]{v['layout']}[/]: {v['reason']}", soft_wrap=True)
