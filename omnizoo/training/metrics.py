"""The run folder and what is measured into it: `metrics.jsonl`.

`metrics.jsonl` holds one object per optimizer step, each step exactly once however often the run was killed. Floats
read back bit for bit; where JSON has no number (NaN, infinity) there is a string, so that any parser can read the file,
and null means "not known". Only rank 0 writes.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnizoo.checkpoint.ownership import RUN_FILE
from omnizoo.config.errors import UserError

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class RunFolder:
    """The names inside `log.dir`. Nothing is created before the first writer needs it."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def identity(self) -> Path:
        return self.root / RUN_FILE

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def bad_steps(self) -> Path:
        return self.root / "bad_steps.jsonl"

    @property
    def bad_rows(self) -> Path:
        return self.root / "bad_rows.jsonl"

    @property
    def starts(self) -> Path:
        return self.root / "starts.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    def items_of(self, step: int) -> Path:
        """What the model has produced at the evaluation after `step`."""
        return self.root / "samples" / f"step_{step:08d}"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def wandb_id(self) -> Path:
        return self.root / "wandb_id"


def replace_file(path: Path, text: str) -> None:
    """Give `path` new content as a whole: a reader, or a run started after a crash, sees the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a `metrics.jsonl`, in order; a last line that a kill left half written is not a step."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    lines = path.read_bytes().split(b"\n")  # the last piece has no newline: empty, or half a line
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            rows.append({key: float(value) if isinstance(value, str) else value for key, value in row.items()})
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}:{number} is not an object of numbers ({error}); delete that line") from error
    return rows


def _line(row: Mapping[str, Any]) -> str:
    # json.dumps names them NaN, Infinity and -Infinity, which float() and JavaScript's Number() read; here as strings.
    plain = {k: json.dumps(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


class MetricsWriter:
    """Appends one object per step to `metrics.jsonl`.

    Steps count from 1; `resume_step` is the last one in the loaded checkpoint (0: from the start). What an earlier
    process wrote past it is dropped, because those steps are about to be run again. To never lose a step either, the
    trainer writes step n and calls `flush` before it commits the checkpoint of step n.

    What cannot be written raises OSError, and leaves whole lines only: later steps may follow once there is room.
    """

    def __init__(self, run: RunFolder, resume_step: int) -> None:
        rows = [row for row in read_metrics(run.metrics) if 0 < row["step"] <= resume_step]
        replace_file(run.metrics, "".join(map(_line, rows)))
        self._file, self._step = AppendingFile(run.metrics), resume_step

    def write(self, step: int, metrics: Metrics) -> None:
        assert step > self._step, f"step {step} after step {self._step}: a step is written once"
        self._step = step
        self._file.write(_line({"step": step, **metrics}).encode())

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class AppendingFile:
    """A file to which whole records are added. Unbuffered: one write() each, so a kill can only tear the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def write(self, record: bytes) -> None:
        """The whole record or, with an OSError, nothing of it: the next one must not follow half a one."""
        before = os.fstat(self._file.fileno()).st_size
        if (written := self._file.write(record)) != len(record):
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, f"only {written} of {len(record)} bytes fit", str(self._path))

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
