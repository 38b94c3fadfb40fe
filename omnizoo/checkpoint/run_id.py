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
    resume: str  # `request_of` the config at the first start; a command with the same value resumes the run

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def new_id() -> str:
    return uuid.uuid4().hex[:12]


def read_identity(root: Path) -> Identity | None:
    """Return the run that the run folder `root` belongs to; None if there is none, or if its file cannot be read."""
    try:
        fields = json.loads((root / RUN_FILE).read_bytes())
        return Identity(str(fields["id"]), str(fields["resume"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): the run is known by its checkpoints only", root / RUN_FILE, error)
        return None


def owners(directory: Path) -> dict[str, Path]:
    """Return the ids of the runs that have checkpoints in `directory`, and the newest checkpoint of each."""
    found: dict[str, Path] = {}
    for folder in folders.checkpoints(directory):
        if (run := folders.owner(folder)) is not None:
            found.setdefault(run, folder)
    return found


def only_owner(directory: Path, root: Path) -> str | None:
    """Return the id of the run that all checkpoints in `directory` belong to; None if there is no run yet.

    Raises:
        UserError: If the checkpoints belong to several runs, or to another run than the run folder `root`.
    """
    known, found = read_identity(root), owners(directory)
    strangers = {run: newest for run, newest in found.items() if known is not None and run != known.id}
    if strangers:
        run, newest = next(iter(strangers.items()))
        raise UserError(
            f"{newest} is of another run ({run}) than {root} ({known.id if known else ''}): move one of them away, or "
            "give the run a log.dir and a checkpoint.dir of its own"
        )
    if len(found) > 1:
        listed = ", ".join(f"{newest.name} of {run}" for run, newest in found.items())
        raise UserError(f"{directory} holds checkpoints of several runs ({listed}): move those of all but one away")
    return known.id if known is not None else next(iter(found), None)
