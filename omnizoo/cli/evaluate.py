"""`omnizoo eval`: the config of a run or a file, then the evaluation in this process or in ranks started for it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omnizoo.cli.failure import report_failure
from omnizoo.cli.launch import LAUNCHER_FD, launch, watch_launcher
from omnizoo.cli.train import MOST_RANKS
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.parallel.layout import plan_layout
from omnizoo.parallel.rendezvous import place_in_world

DOORS = ("kind", "module", "recipe", "rows", "schedule")  # keys, of whatever section, that may name code


def evaluate(
    target: Path,
    overrides: list[str],
    checkpoint: Path | None,
    best: bool,
    out: Path | None,
    nproc: int | None,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> int:
    """`target` is a config, or the folder of a run, whose config and checkpoints are taken."""
    is_run = target.is_dir()
    path = target / "config.yaml" if is_run else target
    if is_run and not path.is_file():
        raise UserError(f"{target} is not the folder of a run: it has no config.yaml; give that, or a config")
    if checkpoint is not None and best:
        raise UserError("give one of --checkpoint DIR and --best")
    place = place_in_world()
    config = load_config(str(path), overrides, notices=LAUNCHER_FD not in os.environ and not (place and place[0]))
    if is_run:
        config = only_allowed(config, target, allow_code, trust_remote_code)
    if nproc is not None and (not 1 <= nproc <= MOST_RANKS or place is not None):
        raise UserError(f"--nproc is {nproc}; expected 1 to {MOST_RANKS}, and none under torchrun or Slurm")
    world = place[1] if place else nproc or 1
    plan_layout(config.parallel, world)
    if place is None and world > 1:
        given = {"--checkpoint": checkpoint, "--out": out}
        flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
        flags += [part for name in allow_code for part in ("--allow-code", name)]
        switches = {"--best": best, "--trust-remote-code": trust_remote_code}
        flags += [switch for switch, is_on in switches.items() if is_on]
        return launch(["eval", str(target), *overrides, *flags], world)
    watch_launcher()
    from omnizoo.training.eval_run import Wanted, evaluate_run

    return evaluate_run(config, Wanted(checkpoint or (target if is_run else None), best), out, report_failure)


def only_allowed(config: Config, run: Path, allow_code: Sequence[str], trust_remote_code: bool) -> Config:
    """A run folder may be anybody's: of code that its config names, only what the command line allows is imported."""
    for name in named_code(config.model_dump(mode="json")):
        module = name.partition(":")[0]
        if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in allow_code):
            raise UserError(
                f"{run}/config.yaml names code of its own ({name}); if you trust it, allow it: --allow-code {module}; "
                "or give the config that is yours in place of the folder"
            )
    if config.model.trust_remote_code and not trust_remote_code:
        raise UserError(f"{run}/config.yaml wants to run code of the model's folder; allow it: --trust-remote-code")
    model = {"allow_code": list(allow_code), "trust_remote_code": trust_remote_code}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def named_code(value: Any, key: str = "") -> Iterator[str]:
    """What stands as `package.module:name` at a door."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from named_code(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from named_code(inner, key)
    elif key in DOORS and isinstance(value, str) and ":" in value:
        yield value
