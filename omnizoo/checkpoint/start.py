"""Where a run starts: its own newest checkpoint, one given by name, the weights of another run, or nowhere."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from omnizoo.checkpoint import folder as folders
from omnizoo.checkpoint import manifest
from omnizoo.checkpoint.ownership import new_id, only_owner, read_identity
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

WEIGHTS = "weights:"
OWN_FOLDER = "give it a log.dir of its own, or move them away"


@dataclass(frozen=True)
class Origin:
    run: str  # id of the run that goes on, or begins
    checkpoint: Path | None  # None: from the model's own initial weights
    weights_only: bool = False  # at step 0, with a new optimizer and a new order of the data
    resume: str = "auto"  # what the run began with; kept in the run folder


@dataclass(frozen=True)
class Plan:
    """What to look for, before any large file is read."""

    origin: Origin
    exact: Path | None = None  # this checkpoint and no other
    newest_in: Path | None = None
    required: bool = False  # there must be one in `newest_in`


def find(config: Config, directory: Path, mesh: Mesh) -> Origin:
    """Where the run starts, as `checkpoint.resume` says. All ranks check files, and all come to the same answer.

    A damaged checkpoint is passed over for the one before, unless it was asked for by name. If all are damaged, the run
    does not start: weeks of training would begin again without a word.
    """
    plan: Plan = mesh.from_first(agree(mesh, lambda: _plan(config, directory) if mesh.is_first else None))
    found = plan.exact
    if plan.exact is not None:
        reason = folders.damage(plan.exact, mesh)
        if reason is not None:
            raise UserError(
                f"checkpoint.resume: {config.checkpoint.resume} is not a complete checkpoint: {reason}; name another"
            )
    elif plan.newest_in is not None:
        found, passed = folders.newest_intact(plan.newest_in, mesh)
        if found is None and passed:
            raise UserError(all_damaged(plan.newest_in, passed))
        if found is None and plan.required:
            raise UserError(f"checkpoint.resume: {plan.newest_in} holds no checkpoint (step_...)")
    origin = plan.origin
    return Origin(origin.run, found, origin.weights_only and found is not None, origin.resume)


def all_damaged(directory: Path, passed: dict[Path, str]) -> str:
    newest, reason = next(iter(passed.items()))
    return (
        f"{directory} holds no intact checkpoint: {newest.name}: {reason}"
        + (f" (and {len(passed) - 1} more)" if len(passed) > 1 else "")
        + "; move it away to start at step 0, or name a good one in checkpoint.resume"
    )


def is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step_") or (path / manifest.NAME).exists()


def checkpoints_in(path: Path) -> Path:
    """Where the checkpoints of a run folder are, or of a folder that is called otherwise and holds some."""
    directory = path / "checkpoints" if folders.checkpoints(path / "checkpoints") else path
    only_owner(directory, path)
    return directory


def _plan(config: Config, directory: Path) -> Plan:
    wanted, root = config.checkpoint.resume, Path(config.log.dir)
    known, present = read_identity(root), folders.checkpoints(directory)
    begins = Origin(new_id(), None, False, wanted)
    if wanted == "never" and not present:
        return Plan(begins)
    own = only_owner(directory, root)
    goes_on = Plan(Origin(own, None, False, known.resume if known else "auto"), newest_in=directory) if own else None
    if wanted == "auto":
        return goes_on or Plan(begins, newest_in=directory)
    if wanted == "never":
        # torchrun starts all ranks anew by the command of the first time, which meant the first time
        if known and known.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and goes_on:
            return goes_on
        raise UserError(f"checkpoint.resume: never, but {directory} holds {present[0].name} of a run: {OWN_FOLDER}")

    weights_only = wanted.startswith(WEIGHTS)
    path = Path(wanted.removeprefix(WEIGHTS)).expanduser()
    if not weights_only and path.resolve().parent == directory.resolve() and folders.step_of(path) is not None:
        _is_newest(path, present)
        origin = Origin(own or new_id(), None, False, known.resume if known else wanted)
        return Plan(origin, exact=path)
    if known and known.resume == wanted and goes_on:
        if present:
            logger.info("the run that began with checkpoint.resume: %s goes on from its own checkpoints", wanted)
            return goes_on
        begins = Origin(known.id, None, False, wanted)  # killed before its first checkpoint
    elif present:
        raise UserError(
            f"checkpoint.resume: {wanted} starts another run than that of {present[0]}, which is in its way: "
            f"{OWN_FOLDER}"
        )
    origin = Origin(begins.run, None, weights_only, wanted)
    if not path.is_dir():
        raise UserError(
            f"checkpoint.resume: {path} is not a folder; expected auto, never, a checkpoint or {WEIGHTS}PATH"
        )
    if is_checkpoint(path):
        return Plan(origin, exact=path)
    if not weights_only:
        raise UserError(f"checkpoint.resume: {path} is not a complete checkpoint: it has no {manifest.NAME}")
    if (path / "config.json").exists():
        raise UserError(f"checkpoint.resume: {path} is a Hugging Face folder; its weights go into model.path")
    return Plan(origin, newest_in=checkpoints_in(path), required=True)


def _is_newest(path: Path, present: list[Path]) -> None:
    """A run that goes on from an older checkpoint would meet its own future, and `auto` would take that."""
    step = folders.step_of(path)
    later = [folder for folder in present if (folders.step_of(folder) or 0) > (step or 0)]
    if later and folders.damage(path) is None:
        raise UserError(
            f"checkpoint.resume: {path} has later checkpoints beside it ({later[0].name}), which the run would mix up "
            f"with its own: {OWN_FOLDER}"
        )
