"""Keys of `optimizer`: kind, options, weight decay, parameter groups, moving average."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, LearningRate, PositiveInt, Text, WeightDecay, alternatives
from omnizoo.config.sections.built_in_options import without_nulls
from omnizoo.config.sections.optimizer_options import OPTIMIZERS, check_optimizer_options

OptimizerKind = Annotated[Text, built_in_or_plugin(OPTIMIZERS, "optimizer")]


class ParameterGroupSettings(ConfigSection):
    """Settings for a group of parameters. A key that is not set keeps its value from outside the group."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(
        ("freeze",), ("lr", "weight_decay", "kind", "options")
    )

    match: Text | Annotated[list[Text], Field(min_length=1)]
    """Glob pattern, or list of patterns, for names of parameters, such as `model.layers.0.*`. A parameter belongs to
    the first group that matches its name."""

    freeze: bool = False
    """Whether the parameters stay fixed. By default, they are trained."""

    lr: LearningRate | None = None
    """Peak learning rate of the group. Default: the `lr` of the encoder, decoder or other component that contains the
    parameter, or else `train.lr`."""

    weight_decay: WeightDecay | None = None
    """Weight decay of all parameters in the group, including norms and biases. Default: as set by
    `optimizer.weight_decay` and `optimizer.no_decay`."""

    kind: OptimizerKind | None = None
    """Optimizer of the group, with the same values as `optimizer.kind`. Default: `optimizer.kind`."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the group's optimizer. If the group has the same kind as `optimizer.kind`, they are added to
    `optimizer.options`."""

    @property
    def patterns(self) -> list[str]:
        """`match` as a list of glob patterns."""
        return [self.match] if isinstance(self.match, str) else self.match

    @model_validator(mode="after")
    def _check_freeze(self) -> "ParameterGroupSettings":
        """Check that a frozen group has no settings for training."""
        if self.freeze and (self.lr or self.weight_decay or self.kind or self.options):
            raise ValueError(
                "freeze: lr, weight_decay, kind and options do not apply to frozen parameters. Remove them, or freeze."
            )
        return self


class EmaSettings(ConfigSection):
    """Settings of the moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Weight of the old average in each update. A value closer to 1 averages over more steps."""

    every: PositiveInt = 1
    """Number of steps between two updates of the average."""


class OptimizerSection(ConfigSection):
    """Keys of `optimizer`."""

    kind: OptimizerKind = "adamw"
    """Optimizer: `adamw`; `muon` (Muon for hidden matrices, AdamW for other parameters); `adafactor` (needs little
    memory); `adamw_8bit` (needs torchao); or `package.module:Class` of a plugin."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the optimizer, such as `betas`, `eps` or `momentum` (docs/reference/components.md)."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the two moments of AdamW. `bf16` halves their memory and rounds stochastically
    (docs/how-to/memory.md)."""

    weight_decay: WeightDecay = 0.1
    """Coefficient of decoupled weight decay."""

    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(["norm", "bias", "embedding"])
    """Kinds of parameters that get no weight decay."""

    groups: list[ParameterGroupSettings] = Field([])
    """Groups of parameters with their own settings, such as another learning rate. Parameters are selected by name."""

    ema: EmaSettings | None = None
    """Exponential moving average of the weights, for example `{decay: 0.999}`. `omnizoo export --ema` exports it.
    Default: no average is kept."""

    @model_validator(mode="before")
    @classmethod
    def _unset_null_options(cls, value: Any) -> Any:
        """Remove null options from the section and from its groups, if the optimizer is built in."""
        if not isinstance(value, dict):
            return value
        value = without_nulls(value, OPTIMIZERS, cls.model_fields["kind"].default)
        kind = value.get("kind") or cls.model_fields["kind"].default
        groups = value.get("groups")
        if isinstance(groups, list):
            value = value | {"groups": [without_nulls(group, OPTIMIZERS, kind) for group in groups]}
        return value

    @model_validator(mode="after")
    def _check_options(self) -> "OptimizerSection":
        """Check the options of the optimizer and of each group."""
        check_optimizer_options(self.kind, self.options, "optimizer.options")
        if self.moments == "bf16":
            self._check_bf16_moments()
        for i, group in enumerate(self.groups):
            check_optimizer_options(group.kind or self.kind, group.options, f"optimizer.groups.{i}.options")
        return self

    def _check_bf16_moments(self) -> None:
        """Check that the optimizer and its options support bf16 moments."""
        kinds = {self.kind, *(group.kind for group in self.groups)}
        if not kinds & {"adamw", "muon"}:
            raise ValueError(
                f"optimizer.moments: bf16 needs optimizer.kind adamw or muon, but the kind is {self.kind}. Remove "
                "optimizer.moments."
            )
        for name in ("amsgrad", "fused"):
            if name in self.options:
                raise ValueError(f"optimizer.options.{name}: not supported with optimizer.moments: bf16. Remove it.")
