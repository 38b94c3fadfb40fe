"""The id of the run that a folder belongs to."""

import json
import logging
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from omnizoo.checkpoint import folder as folders
from omnizoo.config.errors import UserError

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Identity:
    """The run that a run folder belongs to, as stored in `run.json`."""

    id: str
    resume: str  # result of `request_of` at the first start; a command with the same value resumes the run

    def text(self) -> str:
        """Return the text of `run.json`."""
        return json.dumps(asdict(self)) + "\n"


def new_id() -> str:
    """Return a random id for a new run."""
    return uuid.uuid4().hex[:12]


def read_identity(root: Path) -> Identity | None:
    """Return the run that the run folder `root` belongs to; None if there is none, or if its file cannot be read."""
    try:
        fields = json.loads((root / RUN_FILE).read_bytes())
        return Identity(str(fields["id"]), str(fields["resume"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s). The run is identified by its checkpoints only.", root / RUN_FILE, error)
        return None


def owners(directory: Path) -> dict[str, Path]:
    """Return the ids of the runs that have checkpoints in `directory`, and the newest checkpoint of each."""
    newest_by_run: dict[str, Path] = {}
    for folder in folders.checkpoints(directory):
        run = folders.owner(folder)
        if run is not None:
            newest_by_run.setdefault(run, folder)
    return newest_by_run


def only_owner(directory: Path, root: Path) -> str | None:
    """Return the id of the run that all checkpoints in `directory` belong to; None if there is no run yet.

    Raises:
        UserError: If the checkpoints belong to several runs, or to a different run than the run folder `root` does.
    """
    identity = read_identity(root)
    newest_by_run = owners(directory)
    if identity is not None:
        for run, newest in newest_by_run.items():
            if run != identity.id:
                raise UserError(
                    f"checkpoint.dir: {newest} belongs to run {run}, but {root} belongs to run {identity.id}. Move one "
                    "of them away, or use another log.dir and checkpoint.dir."
                )
    if len(newest_by_run) > 1:
        runs = ", ".join(f"{newest.name} of {run}" for run, newest in newest_by_run.items())
        raise UserError(
            f"checkpoint.dir: {directory} contains checkpoints of several runs ({runs}). Keep those of one run, and "
            "move the others away."
        )
    return identity.id if identity is not None else next(iter(newest_by_run), None)
