"""Built-in loggers: TensorBoard, W&B and the HTML report. They are ordinary callbacks."""

import os
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.versions import install_command
from omnizoo.reporting.metrics_file import AppendingFile
from omnizoo.reporting.report import write_report
from omnizoo.reporting.run_folder import RunFolder, replace_file
from omnizoo.training.callbacks.base import EndEvent, Logger, StartEvent, StepEvent
from omnizoo.training.callbacks.dispatcher import CallbackEntry


def built_in_loggers(config: Config, run: RunFolder) -> list[CallbackEntry]:
    """Return the loggers that the config enables.

    Loggers that write to the run folder share the key `log.dir`, so a full disk causes only one warning.
    """
    entries = []
    if config.log.wandb is not None:
        entries.append(CallbackEntry(WandbLogger(config.log.wandb, run), "log.wandb", ""))
    if config.log.tensorboard:
        entries.append(CallbackEntry(TensorBoardLogger(run.tensorboard), "log.dir", ""))
    entries.append(CallbackEntry(ReportLogger(run), "log.dir", ""))
    return entries


class TensorBoardLogger(Logger):
    """Writes a TensorBoard event file with one event per step.

    torch's `SummaryWriter` is not used, because its writer thread ends with a traceback if the disk is full, and it
    takes more than 1 ms per step if there are many values.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_start(self, event: StartEvent) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorboard imports TensorFlow if it is installed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        self._event = Event
        self._summary = Summary
        self._folder.mkdir(parents=True, exist_ok=True)
        # The time is part of the file name, because TensorBoard reads files in the order of their names.
        seconds, rest = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{rest:09d}"
        self._file = AppendingFile(self._folder / name)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        # TensorBoard discards the events that an earlier process wrote from this step on.
        self._add(step=event.step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def on_step(self, event: StepEvent) -> None:
        values = []
        for name, value in event.metrics.items():
            if value is not None:
                values.append(self._summary.Value(tag=name, simple_value=value))
        self._add(step=event.step, summary=self._summary(value=values))

    def on_end(self, event: EndEvent) -> None:
        self._file.close()


class WandbLogger(Logger):
    """Logs to W&B. A resumed run continues the W&B run with the same id. W&B ignores steps that it already has."""

    def __init__(self, project: str, run: RunFolder) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError(
                f"log.wandb: the value is {project!r}, but wandb is not installed. Run `{install_command('wandb')}`, "
                "or unset log.wandb."
            ) from error
        self._wandb = wandb
        self._project = project
        self._folder = run

    def on_start(self, event: StartEvent) -> None:
        id_file = self._folder.wandb_id
        if event.step == 0 or not id_file.exists():
            replace_file(id_file, uuid.uuid4().hex[:8])
        self._run: Any = self._wandb.init(
            project=self._project,
            id=id_file.read_text(),
            name=self._folder.root.name,
            resume="allow",
            dir=str(self._folder.root),
            config=dict(event.config),
        )

    def on_step(self, event: StepEvent) -> None:
        self._run.log(dict(event.metrics), step=event.step)

    def on_end(self, event: EndEvent) -> None:
        self._run.finish()


class ReportLogger(Logger):
    """Writes `report.html` from the files of the run folder when the run ends."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_end(self, event: EndEvent) -> None:
        write_report(self._run)
