"""Record a run on rank 0: write the files in the run folder, show the progress line and call the callbacks."""

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
from omnizoo.reporting.metrics_file import MetricsWriter, read_metrics
from omnizoo.reporting.notebook import is_notebook, open_progress
from omnizoo.reporting.progress import show_start
from omnizoo.reporting.run_folder import Metrics, replace_file
from omnizoo.reporting.start_clock import StartClock
from omnizoo.training.callbacks.base import StartEvent

if TYPE_CHECKING:
    from omnizoo.training.setup import RunContext


class Recorder:
    """Context manager that writes the files in the run folder, shows the progress line and calls callbacks, on rank 0.

    `on_end` of callbacks writes the report. It is called even if the run fails.
    """

    def __init__(self, run: "RunContext", facts: dict[str, str], clock: StartClock) -> None:
        """Write the config and identity of the run, call `on_start` of the callbacks, and print the start-up table.

        Args:
            run: The run.
            facts: Rows of the start-up table.
            clock: Measures the duration of the start-up.

        Raises:
            UserError: If the run folder cannot be written.
        """
        self._folder = run.folder
        self._is_verbose = run.config.log.verbose
        self._active = run.callbacks.active
        self._callbacks = run.callbacks
        self._first_step = run.state.step + 1
        self._clock = clock
        self._warned: set[str] = set()  # keys for which a warning was already printed
        if self._active:
            self._start(run, facts)

    def _start(self, run: "RunContext", facts: dict[str, str]) -> None:
        """Write the first files of the run folder, call `on_start`, and print the start-up table, on rank 0."""
        config, folder = run.config, run.folder
        step = run.state.step
        start = run.setup.start
        try:
            replace_file(folder.identity, Identity(start.run, start.resume).text())
            save_config(config, folder.config)
            self._writer = MetricsWriter(folder, resume_step=step)
            add_start(folder.starts, step, facts, config.train.steps)
            for file in (folder.bad_steps, folder.bad_rows, folder.samples):  # these steps will be run again
                _drop_after(file, step)
        except OSError as error:
            raise UserError(
                f"log.dir: {error.filename or folder.root} cannot be written: {error.strerror}. "
                "Free some space or choose another folder."
            ) from None
        run.callbacks.warn = self._warn
        event = StartEvent(
            run=folder.root,
            checkpoints=run.checkpoint_dir,
            config=config.model_dump(),
            step=step,
            steps=config.train.steps,
            world=run.mesh.layout.world,
        )
        run.callbacks.start(event)
        show_start(Console(), facts)
        rows = read_metrics(folder.metrics) if is_notebook() else []
        self._progress = open_progress(config.train.steps, step, config.log.every, rows)

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
            earlier_failure = self._callbacks.failure
            if error:
                self._callbacks.end("failed", named_line(error))
            else:
                self._callbacks.end("stopped")
            # This is only a warning, because the error of the run is raised.
            if self._callbacks.failure != earlier_failure:
                self.print(f"warning: {self._callbacks.failure}")

    @contextmanager
    def _despite_full_disk(self) -> Iterator[None]:
        """Context manager that warns once, and lets the run continue, if a file cannot be written."""
        try:
            yield
        except OSError as error:
            self._warn("log.dir", error)

    def _warn(self, key: str, error: OSError) -> None:
        """Print a warning about an error of the logger with the config key `key`, only once for each key."""
        if key not in self._warned:
            problem = named_line(error)
            if key == "log.dir":
                problem = f"{error.filename or self._folder.root} cannot be written: {error.strerror}"
            self.print(f"warning: {key}: {problem}. The run continues without it.")
        self._warned.add(key)

    def step(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a step, call `on_step` of callbacks, and update the progress line."""
        if self._active:
            with self._despite_full_disk():
                self._writer.write(step, metrics)
            self._callbacks.step(step, metrics)
            self._progress.update(step, metrics)
            if step == self._first_step:
                self._report_start()

    def _report_start(self) -> None:
        """Store the duration of each part of the start-up, including the first step; print it if verbose."""
        self._clock.done("first step")
        with self._despite_full_disk():
            add_seconds(self._folder.starts, self._clock.parts)
        if self._is_verbose:
            self.print(self._clock.line)

    def print(self, message: str) -> None:
        """Print a line above the progress line, on rank 0."""
        if self._active:
            self._progress.say(message)

    def bad_rows(self, step: int, rows: Iterable[str]) -> None:
        """Append the messages about bad rows of a step to `bad_rows.jsonl`."""
        self._append(self._folder.bad_rows, ({"step": step, "row": row} for row in rows))

    def bad_step(self, step: int, loss: float, grad_norm: float, samples: list[str]) -> None:
        """Append a skipped step and the names of its samples to `bad_steps.jsonl`."""
        entry = {"step": step, "loss": str(loss), "grad_norm": str(grad_norm), "samples": samples}
        self._append(self._folder.bad_steps, [entry])

    def samples(self, records: Iterable[dict[str, Any]]) -> None:
        """Append responses to held-out prompts to `samples.jsonl`. File names are relative to the run folder."""
        self._append(self._folder.samples, records)

    def flush(self) -> None:
        """Flush `metrics.jsonl`. Call it before saving, so that the file contains all steps of the checkpoint."""
        if self._active:
            with self._despite_full_disk():
                self._writer.flush()

    def _append(self, path: Path, entries: Iterable[dict[str, Any]]) -> None:
        """Append entries to a JSONL file, on rank 0."""
        if self._active:
            with self._despite_full_disk(), open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)


def _drop_after(file: Path, step: int) -> None:
    """Remove the entries of steps after `step` from a JSONL file."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    complete_lines = [line for line in lines if line.endswith("\n")]  # a killed run leaves an incomplete last line
    replace_file(file, "".join(line for line in complete_lines if json.loads(line)["step"] <= step))
