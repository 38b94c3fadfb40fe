"""What a run leaves behind and shows: one object that is silent on every rank but the first."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from omnizoo.checkpoint.ownership import Identity
from omnizoo.checkpoint.start import Origin
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.load import save_config
from omnizoo.config.schema import Config
from omnizoo.training.callbacks import Callbacks, Start
from omnizoo.training.metrics import Metrics, MetricsWriter, RunFolder, replace_file
from omnizoo.training.progress import Progress, show_start
from omnizoo.training.start_clock import StartClock
from omnizoo.training.starts import add_seconds, add_start


class Recorder:
    """`with Recorder(...) as recorder`: the run folder, the progress line, and the report however the run ends."""

    def __init__(
        self, config: Config, run: RunFolder, start: Start, facts: dict[str, str], origin: Origin, callbacks: Callbacks
    ) -> None:
        """`callbacks` are told of the run by this recorder, and so are its loggers."""
        self._run, self._active, self._callbacks = run, callbacks.active, callbacks
        self._warned: set[str] = set()
        if self._active:
            try:
                replace_file(run.identity, Identity(origin.run, origin.resume).text())
                save_config(config, run.config)
                self._writer = MetricsWriter(run, resume_step=start.step)
                add_start(run.starts, start.step, facts, config.train.steps)
                for file in (run.bad_steps, run.bad_rows, run.samples):  # steps that are about to be run again
                    _drop_after(file, start.step)
            except OSError as error:
                raise UserError(f"log.dir: {error.filename or run.root} cannot be written: {error.strerror}") from None
            callbacks.warn = self._warn
            callbacks.start(start)
            show_start(Console(), facts)
            self._progress = Progress(config.train.steps, start.step, config.log.every)

    def __enter__(self) -> "Recorder":
        if self._active:
            self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._progress.__exit__(kind, error, trace)
            with self._despite_full_disk():
                self._writer.close()
            known = self._callbacks.failure
            self._callbacks.end("failed" if error else "stopped", named_line(error) if error else None)
            if self._callbacks.failure != known:  # the run ends with an error of its own
                self.say(f"warning: {self._callbacks.failure}")

    @contextmanager
    def _despite_full_disk(self) -> Iterator[None]:
        """What is written about a run is not worth the run: if it cannot be, that is said once."""
        try:
            yield
        except OSError as error:
            self._warn("log.dir", error)

    def _warn(self, who: str, error: OSError) -> None:
        if who not in self._warned:
            failed = f"{error.filename or self._run.root} cannot be written: {error.strerror}"
            said = failed if who == "log.dir" else named_line(error)
            self.say(f"warning: {who}: {said}; the run goes on without it")
        self._warned.add(who)

    def step(self, step: int, metrics: Metrics) -> None:
        if self._active:
            with self._despite_full_disk():
                self._writer.write(step, metrics)
            self._callbacks.step(step, metrics)
            self._progress.update(step, metrics)

    def started(self, clock: StartClock) -> None:
        """The first step is over: say how long it took to come here, by part, and keep it."""
        if self._active:
            with self._despite_full_disk():
                add_seconds(self._run.starts, clock.parts)
            self.say(clock.line)

    def say(self, message: str) -> None:
        if self._active:
            self._progress.say(message)

    def bad_rows(self, step: int, rows: Iterable[str]) -> None:
        self._append("bad_rows", ({"step": step, "row": row} for row in rows))

    def bad_step(self, step: int, loss: float, grad_norm: float, samples: list[str]) -> None:
        self._append("bad_steps", [{"step": step, "loss": str(loss), "grad_norm": str(grad_norm), "samples": samples}])

    def samples(self, records: Iterable[dict[str, Any]]) -> None:
        """Answers to held-out questions; files are named from the run folder."""
        self._append("samples", records)

    def flush(self) -> None:
        """Before a checkpoint is committed: a step it holds must not be missing from the metrics."""
        if self._active:
            with self._despite_full_disk():
                self._writer.flush()

    def _append(self, which: str, entries: Iterable[dict[str, Any]]) -> None:
        if self._active:
            with self._despite_full_disk(), open(getattr(self._run, which), "a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)


def _drop_after(file: Path, step: int) -> None:
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a kill may have torn the last one
        replace_file(file, "".join(line for line in whole if json.loads(line)["step"] <= step))
