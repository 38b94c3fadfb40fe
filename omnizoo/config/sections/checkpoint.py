"""Keys of `checkpoint`: when checkpoints are saved, which are kept, and which one a run resumes from."""

from typing import Literal

from pydantic import field_validator

from omnizoo.config.sections.base import ConfigSection, PositiveInt, Steps, Text

OLD_WEIGHTS_PREFIX = "weights:"  # in run.json of a run that started from weights, and in configs of earlier versions


class CheckpointSection(ConfigSection):
    every: Steps = 0
    """steps between checkpoints; 0: only at the end of the run"""

    keep: PositiveInt = 2
    """number of newest complete checkpoints to keep"""

    dir: Text | None = None
    """folder of the checkpoints; default: `<log.dir>/checkpoints`"""

    resume: Text = "auto"
    """`auto`: resume from the newest intact checkpoint in `dir`; `never`: start a new run; or a checkpoint folder to
    resume from"""

    best: Text | None = None
    """a metric of evaluations, such as `eval/loss`: save after each evaluation that improves it, and keep that
    checkpoint in addition to the newest `keep`"""

    on_save_error: Literal["stop", "continue"] = "stop"
    """when saving fails (such as a full disk): `stop` with an error, or warn and `continue` to train; earlier
    checkpoints stay intact"""

    @field_validator("resume")
    @classmethod
    def _check_resume(cls, value: str) -> str:
        if value.startswith(OLD_WEIGHTS_PREFIX):
            path = value.removeprefix(OLD_WEIGHTS_PREFIX) or "PATH"
            raise ValueError(f"{value} is now model.init_from: {path}, which starts a new run")
        return value

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after `step`."""
        return self.every > 0 and step % self.every == 0
