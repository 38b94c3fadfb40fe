"""Keys of `train`: length, batch, learning rate, losses, precision."""

import math
from typing import Annotated, Any, ClassVar, Literal

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
    alternatives,
)
from omnizoo.config.sections.built_in_options import check_options, without_nulls
from omnizoo.config.sections.loss_options import LOSSES, PAIRWISE, default_name

SCHEDULES = ("constant", "linear", "cosine", "wsd")


class LossSettings(ConfigSection):
    """Settings of one loss."""

    kind: Annotated[Text, built_in_or_plugin(LOSSES, "loss")] = "cross_entropy"
    """loss: `cross_entropy` for text; `dpo`, `orpo`, `simpo`, `kto` for preferences (docs/how-to/preferences.md);
    `grpo`, `gspo` for rollouts (docs/how-to/rl.md); `balance`, `router_z` for MoE routers; or `package.module:Class` of
    a plugin, a subclass of `omnizoo.Loss`"""

    weight: LossWeight = 1.0
    """factor of the loss in the sum; 0: only a metric"""

    options: dict[str, Any] = Field({})
    """arguments of the loss (docs/how-to/plugins.md) or of the plugin class"""

    name: MetricName | None = None
    """NAME in the name of the metric, `loss/NAME`; default: `text` for cross_entropy, the kind for other built-in
    losses, the name of the class in lower case for plugins"""

    @property
    def label(self) -> str:
        """Name of the loss in metrics: `loss/LABEL`."""
        return self.name or default_name(self.kind)

    @model_validator(mode="before")
    @classmethod
    def _unset_null_options(cls, value: Any) -> Any:
        return without_nulls(value, LOSSES, cls.model_fields["kind"].default)


class TrainSection(ConfigSection):
    """Keys of `train`."""

    # In each pair, one key is derived from the other.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = (
        alternatives(("epochs",), ("steps",))
        | alternatives(("warmup_ratio",), ("warmup_steps",))
        | alternatives(("tokens_per_step",), ("packs_per_step",))
    )

    steps: PositiveInt = 1000
    """number of optimizer steps of the run"""

    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """number of times that each row is read, instead of `steps`; packs are counted before the run
    (docs/how-to/data.md)"""

    packs_per_step: Count = 8
    """number of packs per optimizer step, over all ranks"""

    tokens_per_step: Annotated[int, Field(ge=2, le=2**50)] | None = None
    """number of tokens per optimizer step, instead of `packs_per_step`; a multiple of `data.pack_tokens`"""

    micro_batch: Count = 1
    """number of packs per forward pass on one rank"""

    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    """dtype of forward and backward; bf16 keeps fp32 master weights and reduces gradients in fp32; fp64 is for
    comparisons on CPUs; default: bf16 on accelerators, fp32 on CPUs"""

    lr: LearningRate = 3e-4
    """peak learning rate"""

    schedule: Annotated[Text, built_in_or_plugin(SCHEDULES, "schedule")] = "cosine"
    """learning rate after warmup: `constant`, `linear` or `cosine` decay to `min_lr_ratio`, `wsd`
    (warmup-stable-decay), or `package.module:function` of a plugin: (train config, step) -> learning rate"""

    warmup_steps: Steps = 0
    """number of steps of linear warmup from zero"""

    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """fraction of the steps for warmup, rounded up, instead of `warmup_steps`"""

    decay_steps: Steps = 0
    """number of steps of linear decay at the end of the schedule `wsd`; 0: a fifth of the run"""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """final learning rate / peak learning rate"""

    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """maximum global gradient norm; 0: no clipping"""

    losses: list[LossSettings] = Field([LossSettings(kind="cross_entropy")])
    """losses to sum with their weights, in addition to the loss of each decoder (docs/how-to/plugins.md)"""

    router_bias_rate: LossWeight = 0.0
    """change per step of the correction bias of MoE routers towards even load, without a loss; 0: fixed bias"""

    compile: bool = False
    """whether to compile the blocks of the model with torch.compile, one kind of block at a time
    (docs/how-to/speed.md)"""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of initial weights, data order and dropout"""

    deterministic: bool = False
    """whether repeated runs on the same devices are bitwise equal: torch uses deterministic algorithms, and an operator
    without one is an error (docs/explanation/precision.md)"""

    max_bad_steps: PositiveInt = 3
    """number of consecutive skipped (non-finite) steps after which the run stops"""

    @property
    def warmup(self) -> int:
        """Number of warmup steps."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup_steps

    @model_serializer(mode="wrap")
    def _without_derived(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit values that are derived from another key, because a saved config must not set both keys."""
        sources = {"steps": self.epochs, "packs_per_step": self.tokens_per_step}
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if sources.get(key) is None}

    @model_validator(mode="before")
    @classmethod
    def _check_exclusive(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for key in ("epochs", "warmup_ratio"):  # `Config` checks tokens_per_step, because it derives packs_per_step
            (other,) = cls.exclusive[key]
            if value.get(key) and value.get(other) not in (None, 0):
                raise ValueError(
                    f"train.{key}: train.{other} is also set, and one determines the other. Remove one of them."
                )
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
                    f"train.losses.{i} ({loss.kind}): the name {loss.label!r} is already used by "
                    f"train.losses.{other}. Set another `name`."
                )

        kinds = [loss.kind for loss in self.losses]
        pairwise = [kind for kind in kinds if kind in PAIRWISE]
        if "kto" in kinds and pairwise:
            raise ValueError(
                f"train.losses: kto needs labeled responses, but {pairwise[0]} needs preference pairs. Remove one of "
                "them."
            )
        return self
