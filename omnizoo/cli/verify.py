"""`omnizoo verify`: proves that every layout of the user's own config computes what one process does."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config

if TYPE_CHECKING:
    from omnizoo.verification.compare import Verdict

MOST_RANKS = 128


@dataclass(frozen=True)
class Trying:
    """What is tried, and on what."""

    world: int
    layouts: str
    precision: str
    device: str


def verify(
    path: str,
    overrides: list[str],
    world: int,
    layouts: str,
    precision: str,
    device: str = "cpu",
    families: str | None = None,
    markdown: Path | None = None,
) -> int:
    """0 if all layouts agree with one process, 1 if one does not.

    A config that cannot be trained is an error. Of several families, one that cannot be trained is listed with the
    reason, and the others are tried.
    """
    if not 1 <= world <= MOST_RANKS:
        raise UserError(f"--world is {world}; expected 1 to {MOST_RANKS} ranks, which run on this machine")
    if families is not None and not all(name.strip() for name in families.split(",")):
        raise UserError(f"--families is {families!r}; expected `all`, or names with commas between them")
    config, trying = load_config(path, overrides), Trying(world, layouts, precision, device)
    names = family_names(families) if families else []
    configs = dict.fromkeys(names, config) or {Path(path).stem: config}
    console = Console()
    if not console.is_terminal:
        console.width = 200
    found: dict[str, list[Verdict]] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, own in configs.items():
            folder = Path(temporary) / name
            try:
                found[name] = try_layouts(own, name if names else None, trying, folder, console)
            except UserError as error:
                if not names:
                    raise
                refused[name] = str(error)
                console.print(f"{name} is refused: {error}\n", soft_wrap=True, highlight=False, markup=False)
            else:
                show(name, found[name], console)
            if markdown is not None:
                markdown.write_text(as_markdown(found, refused, world, precision))
    verdicts = [verdict for each in found.values() for verdict in each]
    agree = sum(verdict.passed for verdict in verdicts)
    console.print(f"{agree} of {len(verdicts)} layouts of {world} ranks agree with one process ({precision})")
    if refused:
        console.print(f"refused, each with its reason above: {', '.join(refused)}", soft_wrap=True)
    return int(agree < len(verdicts))


def family_names(wanted: str) -> list[str]:
    from omnizoo.recipes.zoo import MANY
    from omnizoo.recipes.zoo import families as zoo
    from omnizoo.verification.prepare import check_family

    # Families that read more than text need rows and settings of their own: examples/published has them.
    known = {"all": [entry.family for entry in zoo() if not entry.is_omni], "many": list(MANY)}
    names = known.get(wanted) or [name.strip() for name in wanted.split(",")]
    for name in names:
        check_family(name)
    return names


def try_layouts(config: Config, family: str | None, trying: Trying, folder: Path, console: Console) -> list["Verdict"]:
    from transformers.utils import logging as transformers_logging

    from omnizoo.training.probe import FAILURES
    from omnizoo.verification.compare import failed, verdict_of
    from omnizoo.verification.conditioning import decide
    from omnizoo.verification.prepare import prepare, with_family
    from omnizoo.verification.world import RankError

    transformers_logging.set_verbosity_error()  # it would warn of ids that the shrunken vocabulary lacks
    if family is None:
        chosen = prepare(config, trying.world, trying.layouts, trying.precision, folder, trying.device)
    else:
        config = with_family(config, family)
        try:
            chosen = prepare(config, trying.world, trying.layouts, trying.precision, folder, trying.device)
        except FAILURES as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{family} cannot be trained in one process: {named_line(error)}") from error
    verdicts = []
    for layout in track(chosen, description=family or "", console=console, transient=True):
        try:
            verdict = verdict_of(folder, layout, trying.device)
            if trying.precision == "fp32":
                verdict = decide(config, layout, folder, verdict, trying.device)
            verdicts.append(verdict)
        except RankError as error:
            if family is None:
                raise
            verdicts.append(failed(layout, str(error)))
    return verdicts


def show(name: str, verdicts: Sequence["Verdict"], console: Console) -> None:
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
        elif v.note:
            console.print(f"{v.layout} agrees {v.note}", soft_wrap=True)


def as_markdown(found: dict[str, list["Verdict"]], refused: dict[str, str], world: int, precision: str) -> str:
    """What was found, as a page: a line per family."""
    agreeing = [name for name, verdicts in found.items() if all(verdict.passed for verdict in verdicts)]
    lines = [
        "# Families",
        "",
        f"{len(found) + len(refused)} families of causal language models: {len(agreeing)} agree with one process on "
        f"every layout tried, {len(found) - len(agreeing)} do not, {len(refused)} are refused, with the reason that "
        "`omnizoo train` gives. Largest relative differences of three steps, shrunken models, "
        f"{world} ranks, {precision}.",
        "",
        "This page is written by `omnizoo verify examples/text_tiny.yaml --families many --layouts few --markdown "
        "docs/families.md` (`make verify-all`).",
        "",
        "| family | layouts | loss | gradient | norm | |",
        "|---|---|---|---|---|---|",
    ]
    for name, verdicts in found.items():
        if name in agreeing:
            outcome = " ".join(["agrees", *(v.note for v in verdicts if v.note)])
        else:
            outcome = "; ".join(f"{v.layout}: {v.reason}" for v in verdicts if v.reason)
        figures = [f"{max(getattr(v, key) for v in verdicts):.0e}" for key in ("loss", "gradient", "grad_norm")]
        cells = [f"`{name}`", ", ".join(v.layout for v in verdicts), *figures, outcome]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason.replace('|', chr(92) + '|')} |" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"
