"""Find the starting point of a run: its newest or a named checkpoint, the weights of another run, or new weights."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from omnizoo.checkpoint import folder as folders
from omnizoo.checkpoint import manifest, retention
from omnizoo.checkpoint.run_id import new_id, only_owner, read_identity
from omnizoo.config.errors import UserError
from omnizoo.config.hub import parse_name
from omnizoo.config.schema import Config
from omnizoo.config.sections.checkpoint import OLD_WEIGHTS_PREFIX
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

ADVICE = "Use another log.dir, or move the existing checkpoints away."


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint or weights that a run begins from."""

    run: str  # id of the resumed or new run
    checkpoint: Path | None  # None to start from the initial weights of the model
    weights_only: bool = False  # start at step 0, with a new optimizer and from the start of the data
    resume: str = "auto"  # result of `request_of` at the first start; stored in the run folder


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint to look for, decided before any large file is read."""

    origin: StartingPoint
    exact: Path | None = None  # use this checkpoint, or raise an error if it is damaged
    newest_in: Path | None = None  # use the newest intact checkpoint in this folder
    required: bool = False  # raise an error if `newest_in` has no checkpoint


def find_checkpoint(config: Config, directory: Path, mesh: Mesh) -> StartingPoint:
    """Find the starting point of a run. Collective: all ranks must call it.

    `checkpoint.resume` and `model.init_from` determine what to look for. The ranks verify the hashes of the files
    together. A damaged checkpoint is skipped in favor of the one before it, unless the config names it.

    Args:
        config: The config of the run.
        directory: Folder of the checkpoints of the run.
        mesh: The device mesh.

    Returns:
        The starting point, identical on all ranks.

    Raises:
        UserError: If the named checkpoint is missing or damaged, if it conflicts with the checkpoints in `directory`,
            or if all checkpoints are damaged, because the run would otherwise silently start again at step 0.
    """
    plan: ResumePlan = mesh.from_first(sync_errors(mesh, lambda: _plan(config, directory) if mesh.is_first else None))
    checkpoint = plan.exact
    if plan.exact is not None:
        reason = folders.damage(plan.exact, mesh)
        if reason is not None:
            key = "model.init_from" if plan.origin.weights_only else "checkpoint.resume"
            raise UserError(f"{key}: {plan.exact} is damaged or incomplete: {reason}. Choose another checkpoint.")
    elif plan.newest_in is not None:
        checkpoint, damaged = folders.newest_intact(plan.newest_in, mesh)
        if checkpoint is None and damaged:
            raise UserError(all_damaged(plan.newest_in, damaged))
        if checkpoint is None and plan.required:
            raise UserError(
                f"model.init_from: {plan.newest_in} contains no checkpoint (step_...). Pass a checkpoint or another "
                "run folder."
            )
    weights_only = plan.origin.weights_only and checkpoint is not None
    return replace(plan.origin, checkpoint=checkpoint, weights_only=weights_only)


def all_damaged(directory: Path, damaged: dict[Path, str]) -> str:
    """Return the error message for a folder in which all checkpoints are damaged. `damaged` contains the reasons."""
    newest, reason = next(iter(damaged.items()))
    others = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return (
        f"checkpoint.dir: {directory} contains no intact checkpoint: {newest.name}: {reason}{others}. Move the folder "
        "away to start at step 0, or set checkpoint.resume to an intact checkpoint."
    )


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, judging by its name or its manifest."""
    return path.name.startswith("step_") or (path / manifest.NAME).exists()


def checkpoints_in(path: Path) -> Path:
    """Return the folder that contains the checkpoints of a run: `path/checkpoints` if it has any, otherwise `path`.

    Raises:
        UserError: If the checkpoints belong to several runs, or to a different run than the folder does.
    """
    directory = path / "checkpoints" if folders.checkpoints(path / "checkpoints") else path
    only_owner(directory, path)
    return directory


def request_of(config: Config) -> str:
    """Return the requested start of a run, as stored in run.json: `auto`, `never`, a checkpoint or `weights:PATH`.

    `model.init_from: PATH` is stored as `weights:PATH`, as in earlier versions, so that their runs can be resumed.
    """
    if config.model.init_from is not None and config.checkpoint.resume == "auto":
        return OLD_WEIGHTS_PREFIX + config.model.init_from
    return config.checkpoint.resume


def _plan(config: Config, directory: Path) -> ResumePlan:
    """Decide which checkpoint to look for, based on the config and the folders of the run."""
    request = request_of(config)
    root = Path(config.log.dir)
    identity = read_identity(root)
    existing = folders.checkpoints(directory)
    new_run = StartingPoint(run=new_id(), checkpoint=None, resume=request)
    if request == "never" and not existing:
        return _from_weights(config, new_run)

    run = only_owner(directory, root)
    resumed = None
    if run:
        first_request = identity.resume if identity else "auto"
        origin = StartingPoint(run=run, checkpoint=None, resume=first_request)
        resumed = ResumePlan(origin, newest_in=directory)
    if request == "auto":
        return resumed or ResumePlan(new_run, newest_in=directory)
    if request == "never":
        # torchrun restarts ranks with the original command, but `never` applies to the first start only.
        num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if identity and identity.resume == "never" and num_restarts and resumed:
            return resumed
        raise UserError(
            f"checkpoint.resume: `never` is set, but {directory} already contains the checkpoint {existing[0].name}. "
            f"{ADVICE}"
        )

    key = "checkpoint.resume"
    target = request
    if config.checkpoint.resume == "auto" and config.model.init_from is not None:
        key = "model.init_from"
        target = config.model.init_from
    path = Path(target).expanduser()
    is_in_directory = path.resolve().parent == directory.resolve() and folders.step_of(path) is not None
    if is_in_directory and key == "checkpoint.resume":
        _check_newest(path, existing)
        first_request = identity.resume if identity else request
        return ResumePlan(StartingPoint(run=run or new_id(), checkpoint=None, resume=first_request), exact=path)
    if identity and identity.resume == request and resumed:
        if existing:
            logger.info("%s: %s was used at the first start; the run resumes from its newest checkpoint", key, target)
            return resumed
        # The run was killed before its first checkpoint.
        new_run = StartingPoint(run=identity.id, checkpoint=None, resume=request)
    elif existing:
        raise UserError(f"{key}: {target} starts a new run, but {existing[0]} belongs to an earlier run. {ADVICE}")
    return _from_weights(config, new_run) if key == "model.init_from" else _from_checkpoint(path, new_run)


def _from_weights(config: Config, origin: StartingPoint) -> ResumePlan:
    """Return the plan of a new run. It starts from `model.init_from` if the key is set."""
    if config.model.init_from is None:
        return ResumePlan(origin)
    path = Path(config.model.init_from).expanduser()
    origin = replace(origin, weights_only=True)
    if not path.is_dir():
        hint = "" if parse_name(config.model.init_from) is None else " For a model on the hub, set model.path instead."
        raise UserError(f"model.init_from: {path} is not a folder. Pass a checkpoint or a run folder.{hint}")
    if is_checkpoint(path):
        return ResumePlan(origin, exact=path)
    if (path / "config.json").exists():
        raise UserError(f"model.init_from: {path} is a Hugging Face folder. Set model.path to it instead.")
    return ResumePlan(origin, newest_in=checkpoints_in(path), required=True)


def _from_checkpoint(path: Path, origin: StartingPoint) -> ResumePlan:
    """Return the plan of a new run that continues from a checkpoint of another run."""
    if not path.is_dir():
        raise UserError(f"checkpoint.resume: {path} is not a folder. Use auto, never or the path of a checkpoint.")
    if not is_checkpoint(path):
        raise UserError(
            f"checkpoint.resume: {path} is not a checkpoint, because it has no {manifest.NAME}. Pass a checkpoint."
        )
    return ResumePlan(origin, exact=path)


def _check_newest(path: Path, existing: list[Path]) -> None:
    """Check that no newer checkpoint exists, because `auto` would later resume from the newer one instead.

    If `path` is damaged, newer checkpoints are accepted here, because loading `path` raises an error later.
    """
    step = folders.step_of(path) or 0
    newer = [folder for folder in existing if (folders.step_of(folder) or 0) > step]
    if newer and folders.damage(path) is None:
        raise UserError(f"checkpoint.resume: {path} is older than {newer[0].name} in the same folder. {ADVICE}")


def resolve_checkpoint(checkpoint: Path) -> Path:
    """Return `checkpoint` if it is an intact checkpoint, or the newest intact checkpoint of a run folder.

    Raises:
        UserError: If there is no intact checkpoint.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: this is not a folder. Pass a checkpoint (step_...) or a run folder.")
    if is_checkpoint(checkpoint):
        reason = folders.damage(checkpoint)
        if reason is not None:
            raise UserError(f"{checkpoint}: the files are damaged or incomplete: {reason}. Choose another checkpoint.")
        return checkpoint
    newest, damaged = folders.newest_intact(checkpoints_in(checkpoint))
    if newest is None:
        reasons = "".join(f"; {path.name}: {reason}" for path, reason in damaged.items())
        raise UserError(
            f"{checkpoint}: the folder contains no intact checkpoint (step_...){reasons}. Choose another folder."
        )
    return newest


def best_checkpoint(run: Path) -> Path:
    """Return the best checkpoint of a run folder, as recorded in `best.json`.

    Raises:
        UserError: If there is no record, or if the recorded checkpoint is missing, damaged or from another run.
    """
    if not run.is_dir() or is_checkpoint(run):
        raise UserError(f"--best: {run} is not a run folder. Pass a run folder, or remove the option.")
    directory = checkpoints_in(run)
    best = retention.read_best(directory)
    if best is None:
        raise UserError(
            f"--best: {directory} has no {retention.BEST}. Train with checkpoint.best: eval/loss, or remove the option."
        )
    source = folders.folder_of(directory, best.step)
    if folders.owner(source) != best.run:
        raise UserError(
            f"--best: {directory / retention.BEST} refers to {source.name} of run {best.run}, which does not exist. "
            "Remove the option, or pass a checkpoint."
        )
    return resolve_checkpoint(source)
