"""Keep the newest checkpoints and the best one, and remove older ones."""

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from omnizoo.checkpoint.folder import checkpoints, discard, flush, owner, step_of, write_json
from omnizoo.config.errors import named_line

logger = logging.getLogger(__name__)

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """The checkpoint of a run with the best value of `metric`, as stored in `best.json`."""

    run: str
    metric: str
    value: float
    step: int


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Remove older checkpoints of a run, and leftovers of interrupted saves.

    Args:
        directory: Folder of the checkpoints.
        keep: Number of newest checkpoints to keep, including `newest`. The best checkpoint is kept in addition.
        newest: The checkpoint that was just written. Checkpoints of other runs are not removed.
    """
    run = owner(newest)
    folders = checkpoints(directory)
    older = folders[folders.index(newest) + 1 :]
    older_of_run = [folder for folder in older if owner(folder) == run]
    best = read_best(directory)
    for folder in older_of_run[keep - 1 :]:
        is_best = best is not None and best.run == run and best.step == step_of(folder)
        if not is_best:
            discard(folder)
    clean(directory)


def write_best(directory: Path, best: Best) -> None:
    """Write `best.json` atomically, unless it is up to date."""
    if best == read_best(directory):
        return
    partial = directory / f".{BEST}.partial"
    write_json(partial, asdict(best))
    flush(partial)
    os.replace(partial, directory / BEST)


def read_best(directory: Path) -> Best | None:
    """Read `best.json`. Return None if it does not exist, or after a warning if it cannot be read."""
    try:
        fields = json.loads((directory / BEST).read_bytes())
        best = Best(
            run=str(fields["run"]),
            metric=str(fields["metric"]),
            value=float(fields["value"]),
            step=fields["step"],
        )
        if type(best.step) is not int:
            raise TypeError(f"step is {best.step!r:.40}; expected an integer")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", directory / BEST, named_line(error))
        return None
    return best


def clean(directory: Path) -> None:
    """Remove the folders that interrupted saves have left, recognized by their names."""
    for leftover in directory.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)  # a leftover does no harm
