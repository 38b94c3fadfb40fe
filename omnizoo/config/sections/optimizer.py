"""Keys of `optimizer`: kind, options, weight decay, parameter groups, moving average."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, LearningRate, PositiveInt, Text, WeightDecay, alternatives
from omnizoo.config.sections.built_in_options import without_nulls
from omnizoo.config.sections.optimizer_options import OPTIMIZERS, check_optimizer_options

OptimizerKind = Annotated[Text, built_in_or_plugin(OPTIMIZERS, "optimizer")]


class ParameterGroupSettings(ConfigSection):
    """Settings for a group of parameters. Keys that are not set use the values of the run."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(
        ("freeze",), ("lr", "weight_decay", "kind", "options")
    )

    match: Text | Annotated[list[Text], Field(min_length=1)]
    """glob pattern or list of patterns for names of parameters, such as `model.layers.0.*`; the first matching group
    applies"""

    freeze: bool = False
    """whether the parameters stay fixed; default: trained"""

    lr: LearningRate | None = None
    """peak learning rate; default: the `lr` of the component of the model, or `train.lr`"""

    weight_decay: WeightDecay | None = None
    """weight decay of all parameters of the group, including norms and biases; default: `optimizer.weight_decay` and
    `no_decay`"""

    kind: OptimizerKind | None = None
    """optimizer of the group, one of those of `optimizer.kind`; default: `optimizer.kind`"""

    options: dict[str, Any] = Field({})
    """arguments of the optimizer; added to `optimizer.options` if the kind is the same"""

    @property
    def patterns(self) -> list[str]:
        """The glob patterns of `match` as a list."""
        return [self.match] if isinstance(self.match, str) else self.match

    @model_validator(mode="after")
    def _check_freeze(self) -> "ParameterGroupSettings":
        if self.freeze and (self.lr or self.weight_decay or self.kind or self.options):
            raise ValueError(
                "freeze: lr, weight_decay, kind and options do not apply to frozen parameters. Remove them, or freeze."
            )
        return self


class EmaSettings(ConfigSection):
    """Settings of the moving average of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """fraction of the old average in each update"""

    every: PositiveInt = 1
    """number of steps between updates of the average"""


class OptimizerSection(ConfigSection):
    """Keys of `optimizer`."""

    kind: OptimizerKind = "adamw"
    """optimizer: `adamw`, `muon` (Muon for hidden matrices, AdamW for other parameters), `adafactor`, `adamw_8bit`
    (needs torchao), or `package.module:Class` of a plugin"""

    options: dict[str, Any] = Field({})
    """arguments of the optimizer: `betas`, `eps`, `momentum`, ... (docs/reference/components.md)"""

    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype of the two moments of AdamW; bf16 needs half the memory and rounds stochastically
    (docs/how-to/memory.md)"""

    weight_decay: WeightDecay = 0.1
    """coefficient of decoupled weight decay"""

    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(["norm", "bias", "embedding"])
    """parameters without weight decay"""

    groups: list[ParameterGroupSettings] = Field([])
    """groups of parameters, matched by name, with settings that differ from those of the run"""

    ema: EmaSettings | None = None
    """moving average of the weights, such as `{decay: 0.999}`, for `omnizoo export --ema`; default: none"""

    @model_validator(mode="before")
    @classmethod
    def _unset_null_options(cls, value: Any) -> Any:
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
