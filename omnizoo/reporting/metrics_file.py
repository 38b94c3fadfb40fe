"""Read and write `metrics.jsonl`."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.reporting.run_folder import Metrics, RunFolder, replace_file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step in a `metrics.jsonl`, in order.

    If the last line is incomplete, because the process was killed while writing it, the line is ignored.

    Raises:
        UserError: If another line is damaged.
    """
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    lines = path.read_bytes().split(b"\n")  # the last piece has no newline: it is empty or an incomplete line
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            rows.append({key: float(value) if isinstance(value, str) else value for key, value in row.items()})
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}:{number} is not an object of numbers ({error}); delete that line") from error
    return rows


def _line(row: Mapping[str, Any]) -> str:
    """Return the line of `metrics.jsonl` for the metrics of a step."""
    # Non-finite values are stored as the strings NaN, Infinity and -Infinity. float() and JavaScript's Number() parse
    # them.
    plain = {k: json.dumps(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


class MetricsWriter:
    """Writer that appends one object per step to `metrics.jsonl`.

    The trainer writes step n and calls `flush` before it commits the checkpoint of step n, so no step is lost. A failed
    write raises OSError and leaves only complete lines, so later steps can be written once there is space.

    Args:
        run: The run folder.
        resume_step: The last step in the loaded checkpoint, or 0 for a new run. Later steps in the file are removed,
            because they will run again.
    """

    def __init__(self, run: RunFolder, resume_step: int) -> None:
        rows = [row for row in read_metrics(run.metrics) if 0 < row["step"] <= resume_step]
        replace_file(run.metrics, "".join(map(_line, rows)))
        self._file, self._step = AppendingFile(run.metrics), resume_step

    def write(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of a step. Steps are counted from 1 and must increase."""
        assert step > self._step, f"step {step} after step {self._step}: a step is written once"
        self._step = step
        self._file.write(_line({"step": step, **metrics}).encode())

    def flush(self) -> None:
        """Flush all written steps to disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class AppendingFile:
    """A file to which complete records are appended.

    Each record is written by one unbuffered system call, so a kill of the process can only damage the last record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()

    def write(self, record: bytes) -> None:
        """Write a record completely or not at all.

        Raises:
            OSError: If the record could not be written, for example because the disk is full. A partial record is
                removed, so that the next one starts on a new line.
        """
        size_before = os.fstat(self._file.fileno()).st_size
        written = self._file.write(record)
        if written != len(record):
            os.ftruncate(self._file.fileno(), size_before)
            raise OSError(errno.ENOSPC, f"only {written} of {len(record)} bytes fit", str(self._path))

    def sync(self) -> None:
        """Flush all records to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
