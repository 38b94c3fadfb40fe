"""Keys of `optimizer`: kind, options, weight decay, parameter groups, moving average."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, LearningRate, PositiveInt, Text, WeightDecay
from omnizoo.config.sections.optimizer_options import OPTIMIZERS, check_optimizer_options

OptimizerKind = Annotated[Text, built_in_or_plugin(OPTIMIZERS, "optimizer")]


class ParameterGroupSettings(ConfigSection):
    """Settings for a group of parameters. Keys that are not set use the values of the run."""

    match: Text | Annotated[list[Text], Field(min_length=1)]
    """glob pattern, or a list of them, over names of parameters: `model.layers.0.*`; the first group that matches a
    parameter applies"""

    freeze: bool = False
    """do not train these parameters"""

    lr: LearningRate | None = None
    """peak learning rate; default: that of their component of the model, or `train.lr`"""

    weight_decay: WeightDecay | None = None
    """weight decay of the whole group, norms and biases included; default: `optimizer.weight_decay` and `no_decay`"""

    kind: OptimizerKind | None = None
    """optimizer of the group, as in `optimizer.kind`; default: the run's"""

    options: dict[str, Any] = Field({})
    """arguments of the optimizer; added to `optimizer.options` if the kind is the same"""

    @property
    def patterns(self) -> list[str]:
        return [self.match] if isinstance(self.match, str) else self.match

    @model_validator(mode="after")
    def _check_freeze(self) -> "ParameterGroupSettings":
        if self.freeze and (self.lr or self.weight_decay or self.kind or self.options):
            raise ValueError("what is frozen has no lr, weight_decay, kind or options; leave them or `freeze` out")
        return self


class EmaSettings(ConfigSection):
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """fraction of the average that is kept in each update"""

    every: PositiveInt = 1
    """steps between updates of the average"""


class OptimizerSection(ConfigSection):
    kind: OptimizerKind = "adamw"
    """`adamw`, `muon` (Muon for hidden matrices, AdamW for the rest), `adafactor`, `adamw_8bit` (needs torchao), or
    your own `package.module:Class`"""

    options: dict[str, Any] = Field({})
    """arguments of the optimizer: `betas`, `eps`, `momentum`, ... (docs/optimizers.md)"""

    moments: Literal["fp32", "bf16"] = "fp32"
    """dtype of AdamW's two moments; bf16 takes half the memory and uses stochastic rounding (docs/memory.md)"""

    weight_decay: WeightDecay = 0.1
    """decoupled weight decay"""

    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(["norm", "bias", "embedding"])
    """parameters without weight decay"""

    groups: list[ParameterGroupSettings] = Field([])
    """parameters, by name, with their own settings"""

    ema: EmaSettings | None = None
    """keep a moving average of the weights: `{decay: 0.999}`; exported with the flag `--ema`"""

    @model_validator(mode="after")
    def _check_options(self) -> "OptimizerSection":
        check_optimizer_options(self.kind, self.options, "optimizer.options")
        if self.moments == "bf16":
            self._check_bf16_moments()
        for i, group in enumerate(self.groups):
            check_optimizer_options(group.kind or self.kind, group.options, f"optimizer.groups.{i}.options")
        return self

    def _check_bf16_moments(self) -> None:
        kinds = {self.kind, *(group.kind for group in self.groups)}
        if not kinds & {"adamw", "muon"}:
            raise ValueError(
                f"optimizer.moments: bf16 is for the kinds adamw and muon (for what it leaves to AdamW), and kind is "
                f"{self.kind}; leave it out"
            )
        for name in ("amsgrad", "fused"):
            if name in self.options:
                raise ValueError(f"optimizer.options.{name}: not supported with optimizer.moments: bf16; leave it out")
