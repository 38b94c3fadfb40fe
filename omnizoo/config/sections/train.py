"""Keys of `train`: length, batch, learning rate, losses, precision."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import (
    ConfigSection,
    Count,
    LearningRate,
    LossWeight,
    MetricName,
    PositiveInt,
    Steps,
    Text,
)
from omnizoo.config.sections.built_in_options import check_options
from omnizoo.config.sections.loss_options import LOSSES, PAIRWISE, default_name

SCHEDULES = ("constant", "linear", "cosine", "wsd")
# In each pair, one key is derived from the other.
EXCLUSIVE_KEYS = (("epochs", "steps"), ("warmup_ratio", "warmup_steps"))


class LossSettings(ConfigSection):
    kind: Annotated[Text, built_in_or_plugin(LOSSES, "loss")] = "cross_entropy"
    """`cross_entropy` of text; `dpo`, `orpo`, `simpo`, `kto` of preferences (docs/preferences.md); `grpo` and `gspo` of
    rollouts (docs/rl.md); `balance` and `router_z` of a mixture of experts; or your own `package.module:Class`, a
    subclass of `omnizoo.Loss`"""

    weight: LossWeight = 1.0
    """factor of the loss in the sum; 0: only a metric"""

    options: dict[str, Any] = Field({})
    """arguments of the loss (docs/losses.md), or of your class"""

    name: MetricName | None = None
    """the metric is `loss/NAME`; default: `text` for cross_entropy, else the kind, or the name of your class in lower
    case"""

    @property
    def label(self) -> str:
        return self.name or default_name(self.kind)


class TrainSection(ConfigSection):
    steps: PositiveInt = 1000
    """number of optimizer steps of the run"""

    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """instead of steps: how often each row is read; packs are counted before the run (docs/data.md)"""

    packs_per_step: Count = 8
    """packs per optimizer step, over all ranks"""

    tokens_per_step: Annotated[int, Field(ge=2, le=2**50)] | None = None
    """instead of packs_per_step: tokens per optimizer step, a multiple of `data.pack_tokens`"""

    micro_batch: Count = 1
    """packs per forward pass on one rank"""

    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    """dtype of forward and backward; bf16 keeps fp32 master weights and reduces gradients in fp32, and is the default
    on accelerators; fp64 is for comparisons on CPUs"""

    lr: LearningRate = 3e-4
    """peak learning rate"""

    schedule: Annotated[Text, built_in_or_plugin(SCHEDULES, "schedule")] = "cosine"
    """learning rate after warmup: `constant`, `linear` or `cosine` decay to `min_lr_ratio`, or `wsd`
    (warmup-stable-decay); or your own `package.module:function`: (train config, step) -> learning rate"""

    warmup_steps: Steps = 0
    """steps of linear warmup from zero"""

    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """instead of warmup_steps: fraction of the run's steps, rounded up"""

    decay_steps: Steps = 0
    """`wsd` only: steps of linear decay at the end; 0: a fifth of the run"""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """final learning rate / peak"""

    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """maximum global gradient norm; 0: no clipping"""

    losses: list[LossSettings] = Field([LossSettings(kind="cross_entropy")])
    """losses that are added up with their weights, in addition to the loss of each decoder (docs/losses.md)"""

    router_bias_rate: LossWeight = 0.0
    """for MoE routers with a correction bias: change of the bias per step towards even load, without a loss"""

    compile: bool = False
    """compile the blocks of the model with torch.compile, one kind of block at a time (docs/speed.md)"""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of initial weights, data order and dropout"""

    max_bad_steps: PositiveInt = 3
    """number of skipped (non-finite) steps in a row that stops the run"""

    @property
    def warmup(self) -> int:
        """Number of warmup steps."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup_steps

    @model_serializer(mode="wrap")
    def _without_derived(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit values that are derived from another key: a saved config would set both."""
        sources = {"steps": self.epochs, "packs_per_step": self.tokens_per_step}
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if sources.get(key) is None}

    @model_validator(mode="before")
    @classmethod
    def _check_exclusive(cls, value: Any) -> Any:
        for key, other in EXCLUSIVE_KEYS if isinstance(value, dict) else ():
            if value.get(key) and value.get(other) not in (None, 0):
                raise ValueError(f"train.{key} and train.{other} are both set; one follows from the other, so keep one")
        return value

    @model_validator(mode="after")
    def _check_losses(self) -> "TrainSection":
        first_use: dict[str, int] = {}
        for i, loss in enumerate(self.losses):
            if loss.kind in LOSSES:
                check_options(loss.kind, LOSSES[loss.kind], loss.options, f"train.losses.{i}.options")
            other = first_use.setdefault(loss.label, i)
            if other != i:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}) is called {loss.label!r}, as train.losses.{other} is; give one of "
                    "them another `name`"
                )

        kinds = [loss.kind for loss in self.losses]
        pairwise = [kind for kind in kinds if kind in PAIRWISE]
        if "kto" in kinds and pairwise:
            raise ValueError(
                f"train.losses has kto, which reads responses one by one, and {pairwise[0]}, which reads them in "
                "pairs; leave one of them out"
            )
        return self
