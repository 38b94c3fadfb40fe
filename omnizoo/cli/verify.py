"""`omnizoo verify`: proves that every layout of the user's own config computes what one process does."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config

if TYPE_CHECKING:
    from omnizoo.verification.compare import Verdict

MOST_RANKS = 128


def verify(
    path: str,
    overrides: list[str],
    world: int,
    layouts: str,
    precision: str,
    families: str | None = None,
) -> int:
    """0 if all layouts agree with one process, 1 if one does not."""
    if not 1 <= world <= MOST_RANKS:
        raise UserError(f"--world is {world}; expected 1 to {MOST_RANKS} ranks, which run on this machine")
    if families is not None and not all(name.strip() for name in families.split(",")):
        raise UserError(f"--families is {families!r}; expected `all`, or names with commas between them")
    config = load_config(path, overrides)
    from omnizoo.recipes.zoo import families as zoo
    from omnizoo.verification.compare import verdict_of
    from omnizoo.verification.prepare import prepare, with_family

    # Families that read more than text need rows and settings of their own: examples/published has them.
    text = [entry.family for entry in zoo() if not entry.is_omni]
    names = text if families == "all" else [name.strip() for name in families.split(",")] if families else []
    console, agree, tried = Console(), 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in names or [Path(path).stem]:
            own = with_family(config, name) if names else config
            chosen = prepare(own, world, layouts, precision, Path(temporary) / name)
            verdicts = []
            for layout in track(chosen, description=name, console=console, transient=True):
                verdicts.append(verdict_of(Path(temporary) / name, layout))
            show(name, verdicts, console)
            tried += len(verdicts)
            agree += sum(verdict.passed for verdict in verdicts)
    console.print(f"{agree} of {tried} layouts of {world} ranks agree with one process ({precision})")
    return int(agree < tried)


def show(name: str, verdicts: Sequence["Verdict"], console: Console) -> None:
    if not console.is_terminal:
        console.width = 200
    table = Table(title=f"{name} against one process", title_justify="left")
    for column in ("layout", "loss", "worst gradient", "grad norm", "collectives per step, MiB in each", ""):
        table.add_column(column, overflow="fold")
    for v in verdicts:
        sent = ", ".join(f"{count} {kind} {v.bytes[kind] / 2**20:.2f}" for kind, count in v.calls.items())
        outcome = "[green]pass" if v.passed else "[bold red]FAIL"
        table.add_row(v.layout, f"{v.loss:.0e}", f"{v.gradient:.0e} {v.worst}", f"{v.grad_norm:.0e}", sent, outcome)
    console.print(table)
    for v in verdicts:
        if not v.passed:
            console.print(f"[bold red]{v.layout}[/]: {v.reason}", soft_wrap=True)
