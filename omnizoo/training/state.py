"""Counters of a run that change with each step. Checkpoints store them along with the weights and the data position."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omnizoo.balancing.step_data import StepData
from omnizoo.config.errors import TrainingError
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.step import StepResult


@dataclass
class TrainState:
    """Counters of a run, up to and including its last finished step. Checkpoints store them under these names."""

    step: int = 0
    tokens_seen: int = 0
    bad_steps: int = 0  # steps skipped because of a non-finite loss or gradient
    bad_in_a_row: int = 0  # consecutive skipped steps up to the last step

    @classmethod
    def from_checkpoint(cls, saved: Mapping[str, Any]) -> "TrainState":
        """Return the counters in `saved`, the content of `state.json` of a checkpoint.

        For a new run, `saved` is empty.
        """
        return cls(**{counter.name: saved.get(counter.name, 0) for counter in fields(cls)})

    def advance(self, data: StepData, result: StepResult) -> None:
        """Update the counters after a finished step."""
        self.step += 1
        self.tokens_seen += data.tokens
        if result.finite:
            self.bad_in_a_row = 0
        else:
            self.bad_steps += 1
            self.bad_in_a_row += 1

    def check_bad_steps(self, limit: int, folder: RunFolder) -> None:
        """Raise a `TrainingError` if `limit` (`train.max_bad_steps`) consecutive steps were skipped."""
        if self.bad_in_a_row >= limit:
            raise TrainingError(
                f"{self.bad_in_a_row} steps in a row had a non-finite loss or gradient (train.max_bad_steps). "
                f"Their samples are listed in {folder.bad_steps}."
            )
