"""A logger of one's own: the metrics of a run as a table, `metrics.csv` in the run folder.

PYTHONPATH=examples/csv_logger omnizoo train examples/text_tiny.yaml --log.callbacks '["csv_logger:CsvLogger"]'

MLflow, Trackio and the like go the same way: begin in `on_start`, write in `on_step`, close in `on_end`.
"""

import csv
from pathlib import Path

from omnizoo import EndEvent, Logger, StartEvent, StepEvent


class CsvLogger(Logger):
    """A Logger is a Callback whose OSErrors (disk full, server away) are said once and do not end the run."""

    def __init__(self, columns: list[str] | None = None, name: str = "metrics.csv") -> None:
        self.columns, self.name = columns or ["loss", "grad_norm", "lr", "tokens_seen"], name

    def on_start(self, event: StartEvent) -> None:
        """Steps past the checkpoint that the run goes on from are about to run again: their lines are dropped."""
        path = event.run / self.name
        kept = self._read(path, event.step) if event.step else []
        self.file = open(path, "w", newline="", buffering=1)  # noqa: SIM115 - closed in on_end; a line at a time
        self.writer = csv.writer(self.file)
        self.writer.writerows([["step", *self.columns], *kept])

    def on_step(self, event: StepEvent) -> None:
        self.writer.writerow([event.step, *(event.metrics.get(name) for name in self.columns)])

    def on_end(self, event: EndEvent) -> None:
        self.file.close()

    @staticmethod
    def _read(path: Path, last: int) -> list[list[str]]:
        with open(path, newline="") as file:
            return [line for line in list(csv.reader(file))[1:] if line and int(line[0]) <= last]
