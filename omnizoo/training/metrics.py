"""The run folder and what is measured into it: `metrics.jsonl`, TensorBoard and, on request, W&B.

`metrics.jsonl` holds one object per optimizer step, each step exactly once however often the run was killed. Floats
read back bit for bit; where JSON has no number (NaN, infinity) there is a string, so that any parser can read the file,
and null means "not known". Only rank 0 writes.
"""

import json
import math
import os
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class RunFolder:
    """The names inside `log.dir`. Nothing is created before the first writer needs it."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

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
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

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
    """Appends one object per step to `metrics.jsonl` and the same values to TensorBoard and W&B.

    Steps count from 1; `resume_step` is the last one in the loaded checkpoint (0: from the start). What an earlier
    process wrote past it is dropped, because those steps are about to be run again. To never lose a step either, the
    trainer writes step n and calls `flush` before it commits the checkpoint of step n.
    """

    def __init__(self, run: RunFolder, config: Config, resume_step: int) -> None:
        self._wandb = None if config.log.wandb is None else _start_wandb(run, config, new=resume_step == 0)
        rows = [row for row in read_metrics(run.metrics) if 0 < row["step"] <= resume_step]
        replace_file(run.metrics, "".join(map(_line, rows)))
        # Unbuffered: a step is one write() of one whole line, so a kill can only tear the last one.
        self._file = open(run.metrics, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._path, self._step = run.metrics, resume_step
        self._tensorboard = _TensorBoard(run.tensorboard, resume_step) if config.log.tensorboard else None

    def write(self, step: int, metrics: Metrics) -> None:
        assert step > self._step, f"step {step} after step {self._step}: a step is written once"
        self._step = step
        line = _line({"step": step, **metrics}).encode()
        try:
            written = self._file.write(line)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}; make room and start again") from error
        if written != len(line):
            raise UserError(f"cannot write {self._path}: the disk is full; make room and start again")
        if self._tensorboard is not None:
            self._tensorboard.write(step, metrics)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        os.fsync(self._file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.writer.flush()

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.writer.close()
        if self._wandb is not None:
            self._wandb.finish()


class _TensorBoard:
    """All values of a step as one event: `add_scalar` for each of them took over 1 ms a step."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it imports TensorFlow where that is installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
            from torch.utils.tensorboard import SummaryWriter
        self._summary = Summary
        self.writer = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._events: Any = self.writer.file_writer

    def write(self, step: int, metrics: Metrics) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in metrics.items() if v is not None]
        self._events.add_summary(self._summary(value=values), step)


def _start_wandb(run: RunFolder, config: Config, new: bool) -> Any:
    """A W&B run that goes on under its id after a restart. W&B itself ignores the steps it has already seen."""
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UserError(
            f"log.wandb is {config.log.wandb!r} but wandb is not installed: `pip install omnizoo[wandb]`, or unset it"
        ) from error
    if new or not run.wandb_id.exists():
        replace_file(run.wandb_id, uuid.uuid4().hex[:8])
    return wandb.init(
        project=config.log.wandb,
        id=run.wandb_id.read_text(),
        name=run.root.name,
        resume="allow",
        dir=str(run.root),
        config=config.model_dump(),
    )
