"""A custom logger that writes the metrics of a run to `metrics.csv` in the run folder.

PYTHONPATH=examples/csv_logger omnizoo train examples/text_tiny.yaml --log.callbacks '["csv_logger:CsvLogger"]'

Loggers for MLflow, Trackio and others work the same way: open in `on_start`, write in `on_step`, close in `on_end`.
"""

import csv
from pathlib import Path

from omnizoo import EndEvent, Logger, StartEvent, StepEvent


class CsvLogger(Logger):
    """Write a CSV table.

    A Logger is a Callback whose OSErrors (disk full, server unreachable) are logged once and do not end the run.
    """

    def __init__(self, columns: list[str] | None = None, name: str = "metrics.csv") -> None:
        self.columns = columns or ["loss", "grad_norm", "lr", "tokens_seen"]
        self.name = name

    def on_start(self, event: StartEvent) -> None:
        """Open the table. A resumed run repeats the steps after its checkpoint, so their lines are dropped."""
        path = event.run / self.name
        earlier_lines = self._read(path, event.step) if event.step else []
        self.file = open(path, "w", newline="", buffering=1)  # noqa: SIM115 - on_end closes it; line-buffered
        self.writer = csv.writer(self.file)
        self.writer.writerows([["step", *self.columns], *earlier_lines])

    def on_step(self, event: StepEvent) -> None:
        self.writer.writerow([event.step, *(event.metrics.get(name) for name in self.columns)])

    def on_end(self, event: EndEvent) -> None:
        self.file.close()

    @staticmethod
    def _read(path: Path, last_step: int) -> list[list[str]]:
        """Return the lines of the table up to `last_step`, without the header."""
        with open(path, newline="") as file:
            return [line for line in list(csv.reader(file))[1:] if line and int(line[0]) <= last_step]
