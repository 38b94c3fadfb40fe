"""The built-in loggers: TensorBoard, W&B and the report. Each is a callback as a user's own would be."""

import os
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.training.callbacks import End, Entry, Logger, Start, Step
from omnizoo.training.metrics import AppendingFile, Metrics, RunFolder, replace_file
from omnizoo.training.report import write_report


def built_in_loggers(config: Config, run: RunFolder) -> list[Entry]:
    """As the config has them. What writes to the run folder has one key: one warning is enough for all of it."""
    wandb = [] if config.log.wandb is None else [Entry(WandbLogger(config.log.wandb, run), "log.wandb", "")]
    tensorboard = [TensorBoardLogger(run.tensorboard)] if config.log.tensorboard else []
    return [*wandb, *(Entry(logger, "log.dir", "") for logger in (*tensorboard, ReportLogger(run)))]


class TensorBoardLogger(Logger):
    """An event file, one event a step. Not torch's SummaryWriter: that writes in a thread, which dies of a full disk
    with a traceback, and takes over 1 ms for a step of many values.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, event: Start) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # it imports TensorFlow where that is installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        self._event, self._summary = Event, Summary
        self._folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{rest:09d}"
        self._file = AppendingFile(self._folder / name)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # tells TensorBoard to forget what an earlier process wrote from here on
        self._add(step=event.step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def on_step(self, event: Step) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in event.metrics.items() if v is not None]
        self._add(step=event.step, summary=self._summary(value=values))

    def on_end(self, event: End) -> None:
        self._file.close()


class WandbLogger(Logger):
    """A W&B run that goes on under its id after a restart. W&B itself ignores the steps it has already seen."""

    def __init__(self, project: str, run: RunFolder) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError(
                f"log.wandb is {project!r} but wandb is not installed: `pip install omnizoo[wandb]`, or unset it"
            ) from error
        self._wandb, self._project, self._folder = wandb, project, run

    def on_start(self, event: Start) -> None:
        name = self._folder.wandb_id
        if event.step == 0 or not name.exists():
            replace_file(name, uuid.uuid4().hex[:8])
        self._run: Any = self._wandb.init(
            project=self._project,
            id=name.read_text(),
            name=self._folder.root.name,
            resume="allow",
            dir=str(self._folder.root),
            config=dict(event.config),
        )

    def on_step(self, event: Step) -> None:
        metrics: Metrics = event.metrics
        self._run.log(dict(metrics), step=event.step)

    def on_end(self, event: End) -> None:
        self._run.finish()


class ReportLogger(Logger):
    """`report.html`, drawn from what the run folder holds at the end."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_end(self, event: End) -> None:
        write_report(self._run)
