"""Records a run: files of the run folder, progress line and callbacks. Active on rank 0 only."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from omnizoo.checkpoint.run_id import Identity
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.yaml_file import save_config
from omnizoo.reporting.launch_history import add_seconds, add_start
from omnizoo.reporting.metrics_file import MetricsWriter
from omnizoo.reporting.progress import Progress, show_start
from omnizoo.reporting.run_folder import Metrics, replace_file
from omnizoo.reporting.start_clock import StartClock
from omnizoo.training.callbacks.base import StartEvent

if TYPE_CHECKING:
    from omnizoo.training.setup import RunContext


class Recorder:
    """Context manager that writes the run folder, shows the progress line and calls callbacks, on rank 0.

    `on_end` of callbacks, which writes the report, is called even if the run fails.
    """

    def __init__(self, run: "RunContext", facts: dict[str, str], clock: StartClock) -> None:
        """Write config and identity of the run, call `on_start` of callbacks, and print the start-up table.

        Args:
            run: The run.
            facts: Rows of the start-up table.
            clock: Measures the duration of the start-up.

        Raises:
            UserError: If the run folder cannot be written.
        """
        self._run, self._active, self._callbacks = run.folder, run.callbacks.active, run.callbacks
        self._first_step, self._clock = run.state.step + 1, clock
        self._warned: set[str] = set()
        if self._active:
            self._start(run, facts)

    def _start(self, run: "RunContext", facts: dict[str, str]) -> None:
        config, folder, step, start = run.config, run.folder, run.state.step, run.setup.start
        try:
            replace_file(folder.identity, Identity(start.run, start.resume).text())
            save_config(config, folder.config)
            self._writer = MetricsWriter(folder, resume_step=step)
            add_start(folder.starts, step, facts, config.train.steps)
            for file in (folder.bad_steps, folder.bad_rows, folder.samples):  # these steps will be run again
                _drop_after(file, step)
        except OSError as error:
            raise UserError(f"log.dir: {error.filename or folder.root} cannot be written: {error.strerror}") from None
        run.callbacks.warn = self._warn
        run.callbacks.start(
            StartEvent(
                folder.root, run.checkpoint_dir, config.model_dump(), step, config.train.steps, run.mesh.layout.world
            )
        )
        show_start(Console(), facts)
        self._progress = Progress(config.train.steps, step, config.log.every)

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
            if self._callbacks.failure != known:  # only a warning: the error of the run is raised
                self.print(f"warning: {self._callbacks.failure}")

    @contextmanager
    def _despite_full_disk(self) -> Iterator[None]:
        """Context manager: a file that cannot be written never ends the run. Warn once about it."""
        try:
            yield
        except OSError as error:
            self._warn("log.dir", error)

    def _warn(self, who: str, error: OSError) -> None:
        if who not in self._warned:
            failed = f"{error.filename or self._run.root} cannot be written: {error.strerror}"
            said = failed if who == "log.dir" else named_line(error)
            self.print(f"warning: {who}: {said}; the run goes on without it")
        self._warned.add(who)

    def step(self, step: int, metrics: Metrics) -> None:
        if self._active:
            with self._despite_full_disk():
                self._writer.write(step, metrics)
            self._callbacks.step(step, metrics)
            self._progress.update(step, metrics)
            if step == self._first_step:
                self._report_start()

    def _report_start(self) -> None:
        """Print and store the duration of each part of the start-up, including the first step."""
        self._clock.done("first step")
        with self._despite_full_disk():
            add_seconds(self._run.starts, self._clock.parts)
        self.print(self._clock.line)

    def print(self, message: str) -> None:
        if self._active:
            self._progress.say(message)

    def bad_rows(self, step: int, rows: Iterable[str]) -> None:
        self._append("bad_rows", ({"step": step, "row": row} for row in rows))

    def bad_step(self, step: int, loss: float, grad_norm: float, samples: list[str]) -> None:
        self._append("bad_steps", [{"step": step, "loss": str(loss), "grad_norm": str(grad_norm), "samples": samples}])

    def samples(self, records: Iterable[dict[str, Any]]) -> None:
        """Append responses to held-out prompts to `samples.jsonl`. File names are relative to the run folder."""
        self._append("samples", records)

    def flush(self) -> None:
        """Flush `metrics.jsonl`. Call it before saving, so that the file contains all steps of the checkpoint."""
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
        whole = [line for line in lines if line.endswith("\n")]  # the last line is incomplete if the run was killed
        replace_file(file, "".join(line for line in whole if json.loads(line)["step"] <= step))
