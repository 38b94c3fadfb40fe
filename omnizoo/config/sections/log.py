"""Keys of `log`: run folder, console, profiles, callbacks."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, NamedSettings, PositiveInt, Text

MOST_PROFILED = 50  # maximum number of profiled steps; browsers do not open larger traces


class CallbackSettings(NamedSettings):
    kind: Annotated[str, plugin("a class; expected `package.module:Class`")]
    """`package.module:Class`, a subclass of `omnizoo.Callback`"""

    options: dict[str, Any] = Field({})
    """arguments of the class"""


class LogSection(ConfigSection):
    dir: Text = "runs/default"
    """the run folder, with config, metrics, TensorBoard events, checkpoints and report"""

    every: PositiveInt = 1
    """steps between console lines if the output is not a terminal"""

    profile: Text | None = None
    """steps to profile as `first:last`, such as 10:12; results are in `profile/` of the run folder
    (docs/profiling.md)"""

    profile_ranks: Literal["first", "all"] = "first"
    """ranks that record a trace: rank 0 or all; the summary is that of rank 0"""

    tensorboard: bool = True
    """write TensorBoard events"""

    wandb: Text | None = None
    """W&B project to log to (needs `pip install omnizoo[wandb]`)"""

    callbacks: list[CallbackSettings] = Field([])
    """your own callbacks (docs/callbacks.md): `package.module:Class`, or with arguments `{kind, options}`"""

    @field_validator("profile")
    @classmethod
    def _check_profile(cls, value: str | None) -> str | None:
        if value is None:
            return None
        steps = _parse_range(value)
        if not steps or steps.start < 1 or len(steps) > MOST_PROFILED:
            raise ValueError(
                f"profile is {value!r}; expected `first:last`, such as 10:12: steps from 1 on, at most {MOST_PROFILED}"
            )
        return value

    @property
    def profiled(self) -> range | None:
        """The steps of `profile`."""
        return None if self.profile is None else _parse_range(self.profile)


def _parse_range(text: str) -> range:
    """Return the steps of `first:last`; empty if `text` has another form."""
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)
