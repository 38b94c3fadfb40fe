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
from omnizoo.hub.resolve import resolve_names

if TYPE_CHECKING:
    from omnizoo.parallel.layout import Layout
    from omnizoo.verification.compare import Verdict

MAX_RANKS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo verify`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--world", metavar="N", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument(
        "--layouts",
        default="all",
        help="layouts to compare: `all`, `few` (up to three layouts that together use every axis), or a list such as "
        "dp2.uly2,ring4,rep2.dp2.ep2 (default: all)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp64", "bf16"),
        default="fp32",
        help="dtype of the runs on several ranks (default: fp32); with bf16, they are compared with one process in "
        "fp32, and the tolerance is a multiple of the error of one process in bf16",
    )
    parser.add_argument(
        "--device",
        metavar="KIND",
        default="cpu",
        help="device of the ranks: cpu, or an accelerator of this machine such as cuda, one per rank (default: cpu)",
    )
    parser.add_argument(
        "--families",
        help="model types of transformers to verify: a list, `all` (text models with a recipe), or `many` (a fixed "
        "selection, also without recipes) (default: the model of the config)",
    )
    parser.add_argument(
        "--markdown", metavar="FILE", type=Path, help="Markdown file to write the results to (default: none)"
    )


def run(args: argparse.Namespace) -> int:
    """Compare layouts with one process. Returns 0 if all of them agree, 1 otherwise.

    A config that cannot be trained raises an error. With several families, a family that cannot be trained is listed
    with the reason, and the remaining families are compared.
    """
    check_arguments(args)
    config, _ = resolve_names(load_config(args.config, args.overrides), with_weights=False)
    families = family_names(args.families) if args.families else []
    console = Console()
    if not console.is_terminal:
        console.width = 200

    verdicts: dict[str, list[Verdict]] = {}
    errors: dict[str, str] = {}  # families that cannot be trained, and why
    with tempfile.TemporaryDirectory() as temporary:
        for name in families or [Path(args.config).stem]:
            family = name if families else None
            try:
                verdicts[name] = try_layouts(config, family, args, Path(temporary) / name, console)
            except UserError as error:
                if family is None:
                    raise
                errors[name] = str(error)
                console.print(f"{name} cannot be trained: {error}\n", soft_wrap=True, highlight=False, markup=False)
            else:
                show(name, verdicts[name], console)
            if args.markdown is not None:
                args.markdown.write_text(as_markdown(verdicts, errors, args.world, args.precision))

    outcomes = [verdict.passed for family_verdicts in verdicts.values() for verdict in family_verdicts]
    console.print(
        f"{sum(outcomes)} of {len(outcomes)} layouts of {args.world} ranks agree with one process ({args.precision})"
    )
    if errors:
        console.print(f"families that cannot be trained: {', '.join(errors)}", soft_wrap=True)
    return int(not all(outcomes))


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that argparse does not check."""
    if not 1 <= args.world <= MAX_RANKS:
        raise UserError(f"--world: {args.world}; expected 1 to {MAX_RANKS} ranks, which all run on this machine")
    if args.families is not None and not all(name.strip() for name in args.families.split(",")):
        raise UserError(f"--families: {args.families!r}; expected `all`, `many`, or names separated by commas")


def family_names(families: str) -> list[str]:
    """Return the model types in the value of `--families`."""
    from omnizoo.recipes.zoo import MANY
    from omnizoo.recipes.zoo import families as zoo
    from omnizoo.verification.prepare import check_family

    # `all` excludes multimodal families. Each of them needs different rows and settings: see examples/published.
    if families == "all":
        names = [entry.family for entry in zoo() if not entry.is_omni]
    elif families == "many":
        names = list(MANY)
    else:
        names = [name.strip() for name in families.split(",")]
    for name in names:
        check_family(name)
    return names


def try_layouts(
    config: Config, family: str | None, args: argparse.Namespace, folder: Path, console: Console
) -> list["Verdict"]:
    """Compare each layout in `args` with one process.

    Args:
        config: The user's config.
        family: Model type to verify instead of the model in the config; None for the model in the config.
        args: The command line.
        folder: Folder for the scaled-down config and the results of one process.
        console: Shows the progress.

    Raises:
        UserError: If the model cannot be trained.
        RankError: If a rank of the config's model failed. For a family, the verdict contains the error instead.
    """
    from transformers.utils import logging as transformers_logging

    from omnizoo.verification.compare import failed, verdict_of
    from omnizoo.verification.fp64_check import recheck_in_fp64
    from omnizoo.verification.rank_processes import RankError

    # Silence warnings about token ids outside the vocabulary of the small copy.
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
    """Train the reference in one process, and return the config of the trial and the layouts to compare."""
    from omnizoo.modalities.build import BUILDING_ERRORS
    from omnizoo.verification.prepare import prepare, with_family

    if family is not None:
        config = with_family(config, family)
    try:
        return config, prepare(config, args.world, args.layouts, args.precision, folder, args.device)
    except BUILDING_ERRORS as error:
        if family is None or isinstance(error, UserError):
            raise
        raise UserError(f"--families: {family} failed in one process: {named_line(error)}") from error


def show(name: str, verdicts: Sequence["Verdict"], console: Console) -> None:
    """Print the differences of each layout as a table, and the reasons for failures below it."""
    table = Table(title=f"{name} against one process", title_justify="left")
    for column in ("layout", "loss", "worst gradient", "grad norm", "collectives per step, MiB in each", ""):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        collectives = []
        for kind, count in verdict.calls.items():
            collectives.append(f"{count} {kind} {verdict.bytes[kind] / 2**20:.2f}")
        table.add_row(
            verdict.layout,
            f"{verdict.loss:.0e}",
            f"{verdict.gradient:.0e} {verdict.worst}",
            f"{verdict.grad_norm:.0e}",
            ", ".join(collectives),
            "[green]pass" if verdict.passed else "[bold red]FAIL",
        )
    console.print(table)
    for verdict in verdicts:
        if not verdict.passed:
            console.print(f"[bold red]{verdict.layout}[/]: {verdict.reason}", soft_wrap=True)
        elif verdict.note:
            console.print(f"{verdict.layout} agrees {verdict.note}", soft_wrap=True)


def as_markdown(verdicts: dict[str, list["Verdict"]], errors: dict[str, str], world: int, precision: str) -> str:
    """Return the results as a Markdown page with one table row per family."""
    agreeing = []
    for name, family_verdicts in verdicts.items():
        if all(verdict.passed for verdict in family_verdicts):
            agreeing.append(name)
    return render_file(
        "families.md.jinja",
        verdicts=verdicts,
        errors=errors,
        agreeing=agreeing,
        world=world,
        precision=precision,
    )
