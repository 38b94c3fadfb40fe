"""Keys of `checkpoint`: when checkpoints are saved, which are kept, and which one a run resumes from."""

from typing import Literal

from pydantic import field_validator

from omnizoo.config.sections.base import ConfigSection, PositiveInt, Steps, Text

OLD_WEIGHTS_PREFIX = "weights:"  # in run.json of a run that started from weights, and in configs of earlier versions


class CheckpointSection(ConfigSection):
    """Keys of `checkpoint`."""

    every: Steps = 0
    """number of steps between checkpoints; 0: only at the end of the run"""

    keep: PositiveInt = 2
    """number of newest complete checkpoints to keep"""

    dir: Text | None = None
    """folder of the checkpoints; default: `<log.dir>/checkpoints`"""

    resume: Text = "auto"
    """checkpoint to resume from: `auto` for the newest intact one in `dir`, `never` for a new run, or a checkpoint
    folder"""

    best: Text | None = None
    """evaluation metric, such as `eval/loss`, whose best checkpoint is saved and kept in addition to the newest `keep`;
    default: none"""

    on_save_error: Literal["stop", "continue"] = "stop"
    """action if saving fails, for example on a full disk: `stop` with an error, or `continue` with a warning; earlier
    checkpoints stay intact"""

    @field_validator("resume")
    @classmethod
    def _check_resume(cls, value: str) -> str:
        """Reject `weights:PATH`, the form of earlier versions."""
        if value.startswith(OLD_WEIGHTS_PREFIX):
            path = value.removeprefix(OLD_WEIGHTS_PREFIX) or "PATH"
            raise ValueError(f"{value} is now model.init_from: {path}, which starts a new run")
        return value

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after `step`."""
        return self.every > 0 and step % self.every == 0
