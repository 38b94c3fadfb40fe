"""Find the starting point of a run: its newest checkpoint, a given one, the weights of another run, or new weights."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from omnizoo.checkpoint import folder as folders
from omnizoo.checkpoint import manifest, retention
from omnizoo.checkpoint.run_id import new_id, only_owner, read_identity
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.checkpoint import OLD_WEIGHTS_PREFIX
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

OWN_FOLDER = "give it a log.dir of its own, or move them away"


@dataclass(frozen=True)
class StartingPoint:
    run: str  # id of the resumed or new run
    checkpoint: Path | None  # None to start from the initial weights of the model
    weights_only: bool = False  # start at step 0, with a new optimizer and from the start of the data
    resume: str = "auto"  # `request_of` the config at the first start; stored in the run folder


@dataclass(frozen=True)
class ResumePlan:
    """The checkpoint to look for, decided before any large file is read."""

    origin: StartingPoint
    exact: Path | None = None  # use this checkpoint or raise
    newest_in: Path | None = None  # use the newest intact checkpoint in this folder
    required: bool = False  # raise if `newest_in` has no checkpoint


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
            or if all checkpoints are damaged: the run would otherwise silently start again at step 0.
    """
    plan: ResumePlan = mesh.from_first(sync_errors(mesh, lambda: _plan(config, directory) if mesh.is_first else None))
    found = plan.exact
    if plan.exact is not None:
        reason = folders.damage(plan.exact, mesh)
        if reason is not None:
            key = "model.init_from" if plan.origin.weights_only else "checkpoint.resume"
            raise UserError(f"{key}: {plan.exact} is not a complete checkpoint: {reason}; name another")
    elif plan.newest_in is not None:
        found, passed = folders.newest_intact(plan.newest_in, mesh)
        if found is None and passed:
            raise UserError(all_damaged(plan.newest_in, passed))
        if found is None and plan.required:
            raise UserError(f"model.init_from: {plan.newest_in} contains no checkpoint (step_...)")
    origin = plan.origin
    return StartingPoint(origin.run, found, origin.weights_only and found is not None, origin.resume)


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
    """Return the folder with the checkpoints of a run folder: `checkpoints` if it has any, otherwise `path`.

    Raises:
        UserError: If the checkpoints belong to several runs, or to another run than the folder.
    """
    directory = path / "checkpoints" if folders.checkpoints(path / "checkpoints") else path
    only_owner(directory, path)
    return directory


def request_of(config: Config) -> str:
    """Return how a run with this config starts, as stored in run.json: `auto`, `never`, a checkpoint or `weights:PATH`.

    The stored form of `model.init_from: PATH` is that of earlier versions, so that their runs can be resumed.
    """
    if config.model.init_from is not None and config.checkpoint.resume == "auto":
        return OLD_WEIGHTS_PREFIX + config.model.init_from
    return config.checkpoint.resume


def _plan(config: Config, directory: Path) -> ResumePlan:
    request, root = request_of(config), Path(config.log.dir)
    known, present = read_identity(root), folders.checkpoints(directory)
    new_run = StartingPoint(new_id(), None, False, request)
    if request == "never" and not present:
        return _from_weights(config, new_run)
    own = only_owner(directory, root)
    resumed = (
        ResumePlan(StartingPoint(own, None, False, known.resume if known else "auto"), newest_in=directory)
        if own
        else None
    )
    if request == "auto":
        return resumed or ResumePlan(new_run, newest_in=directory)
    if request == "never":
        # torchrun restarts ranks with the original command; `never` applied to the first start only.
        if known and known.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and resumed:
            return resumed
        raise UserError(f"checkpoint.resume: never, but {directory} holds {present[0].name} of a run: {OWN_FOLDER}")

    key, target = "checkpoint.resume", request
    if config.checkpoint.resume == "auto" and config.model.init_from is not None:
        key, target = "model.init_from", config.model.init_from
    path = Path(target).expanduser()
    is_own = path.resolve().parent == directory.resolve() and folders.step_of(path) is not None
    if is_own and key == "checkpoint.resume":
        _is_newest(path, present)
        return ResumePlan(StartingPoint(own or new_id(), None, False, known.resume if known else request), exact=path)
    if known and known.resume == request and resumed:
        if present:
            logger.info("the run that started from %s resumes from its own checkpoints", target)
            return resumed
        new_run = StartingPoint(known.id, None, False, request)  # the run was killed before its first checkpoint
    elif present:
        raise UserError(
            f"{key}: {target} starts another run than that of {present[0]}, which is in its way: {OWN_FOLDER}"
        )
    return _from_weights(config, new_run) if key == "model.init_from" else _from_checkpoint(path, new_run)


def _from_weights(config: Config, origin: StartingPoint) -> ResumePlan:
    """Return the plan of a new run that starts from `model.init_from`, if it is set."""
    if config.model.init_from is None:
        return ResumePlan(origin)
    path = Path(config.model.init_from).expanduser()
    origin = replace(origin, weights_only=True)
    if not path.is_dir():
        raise UserError(f"model.init_from: {path} is not a folder; expected a checkpoint or the folder of a run")
    if is_checkpoint(path):
        return ResumePlan(origin, exact=path)
    if (path / "config.json").exists():
        raise UserError(f"model.init_from: {path} is a Hugging Face folder; set model.path to it")
    return ResumePlan(origin, newest_in=checkpoints_in(path), required=True)


def _from_checkpoint(path: Path, origin: StartingPoint) -> ResumePlan:
    """Return the plan of a new run that continues from a checkpoint of another run."""
    if not path.is_dir():
        raise UserError(f"checkpoint.resume: {path} is not a folder; expected auto, never or a checkpoint")
    if not is_checkpoint(path):
        raise UserError(f"checkpoint.resume: {path} is not a complete checkpoint: it has no {manifest.NAME}")
    return ResumePlan(origin, exact=path)


def _is_newest(path: Path, present: list[Path]) -> None:
    """Check that no newer checkpoint exists: `auto` would later resume from it instead.

    Newer checkpoints are accepted if `path` is damaged, which raises later.
    """
    step = folders.step_of(path)
    later = [folder for folder in present if (folders.step_of(folder) or 0) > (step or 0)]
    if later and folders.damage(path) is None:
        raise UserError(
            f"checkpoint.resume: {path} has later checkpoints beside it ({later[0].name}), which the run would mix up "
            f"with its own: {OWN_FOLDER}"
        )


def resolve_checkpoint(checkpoint: Path) -> Path:
    """Return `checkpoint` if it is an intact checkpoint, or the newest intact checkpoint of a run folder.

    Raises:
        UserError: If there is no intact checkpoint.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a folder; give a checkpoint (step_...) or a run folder")
    if is_checkpoint(checkpoint):
        if (reason := folders.damage(checkpoint)) is not None:
            raise UserError(f"{checkpoint} is not a complete checkpoint: {reason}")
        return checkpoint
    newest, passed = folders.newest_intact(checkpoints_in(checkpoint))
    if newest is None:
        reasons = "".join(f"; {path.name}: {reason}" for path, reason in passed.items())
        raise UserError(f"{checkpoint} holds no complete checkpoint (step_...){reasons}")
    return newest


def best_checkpoint(run: Path) -> Path:
    """Return the best checkpoint of a run folder, as recorded in `best.json`.

    Raises:
        UserError: If there is no record, or if its checkpoint is missing, damaged or of another run.
    """
    if not run.is_dir() or is_checkpoint(run):
        raise UserError(f"--best: {run} is not the folder of a run; give that, or leave --best out")
    directory = checkpoints_in(run)
    found = retention.read_best(directory)
    if found is None:
        raise UserError(
            f"--best: {directory} has no {retention.BEST}, which runs with checkpoint.best: eval/loss write"
        )
    source = folders.folder_of(directory, found.step)
    if folders.owner(source) != found.run:
        raise UserError(
            f"--best: {directory / retention.BEST} names {source.name} of run {found.run}, which is not there"
        )
    return resolve_checkpoint(source)
