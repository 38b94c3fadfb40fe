"""`omnizoo verify`: check that every layout of a config gives the same results as one process."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table

from omnizoo.cli.render_file import render_file
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config

if TYPE_CHECKING:
    from omnizoo.parallel.layout import Layout
    from omnizoo.verification.compare import Verdict

MOST_RANKS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--world", metavar="N", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--layouts", default="all", help="`all`, `few`, or a list such as dp2.uly2,ring4,rep2.dp2.ep2")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp64", "bf16"),
        default="fp32",
        help="fp64 has hardly any rounding; bf16 is compared with fp32, by the error of one process in bf16",
    )
    parser.add_argument(
        "--device",
        metavar="KIND",
        default="cpu",
        help="device of the ranks: cpu (default), or the accelerator of this machine (cuda, ...), one for each rank",
    )
    parser.add_argument(
        "--families",
        help="model types of transformers to use instead of the config's model: a list, `all` recipes, or `many`",
    )
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="file for the results as a Markdown table")


def run(args: argparse.Namespace) -> int:
    """Compare layouts with one process. Returns 0 if all of them agree, 1 otherwise.

    A config that cannot be trained raises an error. With several families, a family that cannot be trained is listed
    with the reason, and the remaining families are compared.
    """
    if not 1 <= args.world <= MOST_RANKS:
        raise UserError(f"--world is {args.world}; expected 1 to {MOST_RANKS} ranks, which run on this machine")
    if args.families is not None and not all(name.strip() for name in args.families.split(",")):
        raise UserError(f"--families is {args.families!r}; expected `all`, or names with commas between them")
    config = load_config(args.config, args.overrides)
    families = family_names(args.families) if args.families else []
    console = Console()
    if not console.is_terminal:
        console.width = 200

    verdicts: dict[str, list[Verdict]] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in families or [Path(args.config).stem]:
            family = name if families else None
            try:
                verdicts[name] = try_layouts(config, family, args, Path(temporary) / name, console)
            except UserError as error:
                if family is None:
                    raise
                refused[name] = str(error)
                console.print(f"{name} is refused: {error}\n", soft_wrap=True, highlight=False, markup=False)
            else:
                show(name, verdicts[name], console)
            if args.markdown is not None:
                args.markdown.write_text(as_markdown(verdicts, refused, args.world, args.precision))

    passed = [verdict.passed for of_family in verdicts.values() for verdict in of_family]
    console.print(
        f"{sum(passed)} of {len(passed)} layouts of {args.world} ranks agree with one process ({args.precision})"
    )
    if refused:
        console.print(f"refused, each with its reason above: {', '.join(refused)}", soft_wrap=True)
    return int(not all(passed))


def family_names(wanted: str) -> list[str]:
    """Return the model types in `--families`."""
    from omnizoo.recipes.zoo import MANY
    from omnizoo.recipes.zoo import families as zoo
    from omnizoo.verification.prepare import check_family

    # Multimodal families need their own rows and settings, which are in examples/published.
    known = {"all": [entry.family for entry in zoo() if not entry.is_omni], "many": list(MANY)}
    names = known.get(wanted) or [name.strip() for name in wanted.split(",")]
    for name in names:
        check_family(name)
    return names


def try_layouts(
    config: Config, family: str | None, args: argparse.Namespace, folder: Path, console: Console
) -> list["Verdict"]:
    """Compare each layout in `args` with one process, for the config's model or for a `family`."""
    from transformers.utils import logging as transformers_logging

    from omnizoo.verification.compare import failed, verdict_of
    from omnizoo.verification.fp64_check import recheck_in_fp64
    from omnizoo.verification.rank_processes import RankError

    # Silences warnings about token ids outside the vocabulary of the small copy.
    transformers_logging.set_verbosity_error()
    config, layouts = prepare_trial(config, family, args, folder)
    verdicts = []
    for layout in track(layouts, description=family or "", console=console, transient=True):
        try:
            verdict = verdict_of(folder, layout, args.device)
            if args.precision == "fp32":
                verdict = recheck_in_fp64(config, layout, folder, verdict, args.device)
            verdicts.append(verdict)
        except RankError as error:
            if family is None:
                raise
            verdicts.append(failed(layout, str(error)))
    return verdicts


def prepare_trial(
    config: Config, family: str | None, args: argparse.Namespace, folder: Path
) -> tuple[Config, Sequence["Layout"]]:
    """Train in one process as the reference. Returns the config of the trial and the layouts to compare."""
    from omnizoo.modalities.build import BUILDING_ERRORS
    from omnizoo.verification.prepare import prepare, with_family

    if family is not None:
        config = with_family(config, family)
    try:
        return config, prepare(config, args.world, args.layouts, args.precision, folder, args.device)
    except BUILDING_ERRORS as error:
        if family is None or isinstance(error, UserError):
            raise
        raise UserError(f"{family} cannot be trained in one process: {named_line(error)}") from error


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


def as_markdown(verdicts: dict[str, list["Verdict"]], refused: dict[str, str], world: int, precision: str) -> str:
    """Return the results as a Markdown page with one line per family."""
    agreeing = [name for name, tried in verdicts.items() if all(verdict.passed for verdict in tried)]
    return render_file(
        "families.md.jinja",
        verdicts=verdicts,
        refused=refused,
        agreeing=agreeing,
        world=world,
        precision=precision,
    )
