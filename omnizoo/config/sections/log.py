"""Keys of `log`: run folder, console output, profiles, callbacks."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, NamedSettings, PositiveInt, Text

MAX_PROFILED = 50  # maximum number of profiled steps; trace viewers in browsers cannot open larger traces


class CallbackSettings(NamedSettings):
    """Settings of a callback plugin."""

    kind: Annotated[str, plugin("a class; expected `package.module:Class`")]
    """`package.module:Class` of a plugin that is a subclass of `omnizoo.Callback`."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the class."""


class LogSection(ConfigSection):
    """Keys of `log`."""

    dir: Text = "runs/default"
    """Run folder. It contains the config, metrics, TensorBoard events, checkpoints and the report
    (docs/reference/files.md)."""

    every: PositiveInt = 1
    """Number of steps between two lines of progress on the console. It applies only if the output is not a terminal,
    because a terminal shows a progress bar."""

    verbose: bool = False
    """Whether to print how long each part of the start-up took. The option `-v` does the same. The report always
    contains these times."""

    profile: Text | None = None
    """Steps to profile, as `first:last`, such as `10:12`. The results are in `profile/` in the run folder
    (docs/how-to/speed.md). Default: no profile."""

    profile_ranks: Literal["first", "all"] = "first"
    """Ranks that record a trace: only rank 0 (`first`) or `all` ranks. `profile/summary.json` always describes rank
    0."""

    tensorboard: bool = True
    """Whether to write TensorBoard events to the run folder."""

    wandb: Text | None = None
    """Weights & Biases project to log to. It needs `pip install 'omnizoo[wandb]'`. Default: no logging to W&B."""

    callbacks: list[CallbackSettings] = Field([])
    """Callback plugins (docs/how-to/callbacks.md). Each entry is `package.module:Class`, or `{kind, options}` for a
    class with arguments."""

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, value: str | None) -> str | None:
        """Check that the value is a range of steps that is not too long."""
        if value is None:
            return None
        steps = _parse_range(value)
        if not steps or steps.start < 1 or len(steps) > MAX_PROFILED:
            raise ValueError(
                f"{value!r} is not a range of steps. Use `first:last` from step 1, such as 10:12, with at most "
                f"{MAX_PROFILED} steps."
            )
        return value

    @property
    def profiled(self) -> range | None:
        """Steps that `profile` selects; None if it is not set."""
        return None if self.profile is None else _parse_range(self.profile)


def _parse_range(text: str) -> range:
    """Parse `first:last` as a range that includes both steps. Return an empty range if `text` has another form."""
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)
