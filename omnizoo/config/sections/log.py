"""Keys of `log`: run folder, console, profiles, callbacks."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, NamedSettings, PositiveInt, Text

MAX_PROFILED = 50  # maximum number of profiled steps; browsers do not open larger traces


class CallbackSettings(NamedSettings):
    """Settings of a callback plugin."""

    kind: Annotated[str, plugin("a class; expected `package.module:Class`")]
    """`package.module:Class`, a subclass of `omnizoo.Callback`"""

    options: dict[str, Any] = Field({})
    """arguments of the class"""


class LogSection(ConfigSection):
    """Keys of `log`."""

    dir: Text = "runs/default"
    """run folder, with config, metrics, TensorBoard events, checkpoints and report"""

    every: PositiveInt = 1
    """number of steps between console lines, if the output is not a terminal"""

    verbose: bool = False
    """whether to print how long each part of the start-up took (also `-v`); the report shows it in any case"""

    profile: Text | None = None
    """steps to profile as `first:last`, such as 10:12, with results in `profile/` of the run folder
    (docs/how-to/speed.md); default: none"""

    profile_ranks: Literal["first", "all"] = "first"
    """ranks that record a trace: rank 0 (`first`) or `all`; the summary always describes rank 0"""

    tensorboard: bool = True
    """whether to write TensorBoard events"""

    wandb: Text | None = None
    """W&B project to log to, which needs `pip install 'omnizoo[wandb]'`; default: none"""

    callbacks: list[CallbackSettings] = Field([])
    """callback plugins (docs/how-to/callbacks.md): `package.module:Class`, or `{kind, options}` with arguments"""

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, value: str | None) -> str | None:
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
        """The steps that `profile` selects."""
        return None if self.profile is None else _parse_range(self.profile)


def _parse_range(text: str) -> range:
    """Parse `first:last` as a range of steps. The range is empty if `text` has another form."""
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)
