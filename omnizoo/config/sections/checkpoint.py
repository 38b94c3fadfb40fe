"""Keys of `checkpoint`: when to save checkpoints, which ones to keep, and which one to resume from."""

from typing import Literal

from pydantic import field_validator

from omnizoo.config.sections.base import ConfigSection, PositiveInt, Steps, Text

# For a run with `model.init_from`, the starting point in run.json is `weights:PATH`. Configs of earlier versions have
# this value in `checkpoint.resume`.
OLD_WEIGHTS_PREFIX = "weights:"


class ExportSettings(ConfigSection):
    """Exports of the weights during the run, as Hugging Face folders."""

    every: PositiveInt
    """Number of steps between two exports. The last step is exported if it is a multiple of this number."""

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the weights. Default: the dtype of the initial model; without one, the dtype of the run."""

    keep: PositiveInt | None = None
    """Number of exports to keep. Default: all of them."""

    dir: Text | None = None
    """Folder for the exports. Default: `exports` in `log.dir`."""


class CheckpointSection(ConfigSection):
    """Keys of `checkpoint`."""

    every: Steps = 0
    """Number of steps between two checkpoints. With 0, only the end of the run is saved."""

    keep: PositiveInt = 2
    """Number of checkpoints to keep. Older ones are deleted after each save."""

    dir: Text | None = None
    """Folder for the checkpoints. Default: `checkpoints` in `log.dir`."""

    resume: Text = "auto"
    """Checkpoint to resume from. `auto` resumes from the newest intact checkpoint in `checkpoint.dir`, or starts a new
    run if there is none. `never` starts a new run. Another value is the path of a checkpoint."""

    best: Text | None = None
    """Evaluation metric, such as `eval/loss`. The checkpoint with its best value is saved and kept in addition to the
    newest ones. Default: no such checkpoint."""

    on_save_error: Literal["stop", "continue"] = "stop"
    """What happens if saving fails, for example because the disk is full: `stop` ends the run with an error, `continue`
    prints a warning and continues. Earlier checkpoints stay intact."""

    export: ExportSettings | None = None
    """Folders for inference engines, written during the run. Each one is loaded by `from_pretrained` or, for a run with
    an adapter, by PEFT. Default: no exports."""

    @field_validator("resume")
    @classmethod
    def _check_resume(cls, value: str) -> str:
        """Reject the value `weights:PATH` of earlier versions, and name its replacement key."""
        if value.startswith(OLD_WEIGHTS_PREFIX):
            path = value.removeprefix(OLD_WEIGHTS_PREFIX) or "PATH"
            raise ValueError(f"{value} is now model.init_from: {path}, which starts a new run")
        return value

    def exports_at(self, step: int) -> bool:
        """Whether the weights are exported after `step`."""
        return self.export is not None and step % self.export.every == 0

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after `step` because of `every`."""
        return self.every > 0 and step % self.every == 0
