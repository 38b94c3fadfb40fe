"""Keys of `train`: length, batch, learning rate, losses, precision."""

import math
from collections.abc import Sequence
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
from omnizoo.config.sections.loss_options import LOSSES, PAIRWISE, ROUTER_LOSSES, SCORE_LOSSES, default_name
from omnizoo.config.sections.step_sizes import StepSizes

SCHEDULES = ("constant", "linear", "cosine", "wsd")


class LossSettings(ConfigSection):
    """Settings of one loss."""

    kind: Annotated[Text, built_in_or_plugin(LOSSES, "loss")] = "cross_entropy"
    """Loss function: `cross_entropy` for text; `dpo`, `orpo`, `simpo` or `kto` for preferences
    (docs/how-to/preferences.md); `reward` or `classification` for scores (docs/how-to/classification.md); `grpo` or
    `gspo` for rollouts (docs/how-to/rl.md); `balance` or `router_z` for MoE routers; or `package.module:Class` of a
    plugin, a subclass of `omnizoo.Loss`."""

    weight: LossWeight = 1.0
    """Factor of the loss in the total loss. With 0, the loss is only a metric."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the loss (docs/reference/components.md), or of the plugin class."""

    name: MetricName | None = None
    """Name of the loss. It is logged as `loss/NAME`. Default: `text` for `cross_entropy`, the kind for other
    built-in losses, the name of the class in lower case for plugins."""

    @property
    def label(self) -> str:
        """Name of the loss in the metric `loss/NAME`."""
        return self.name or default_name(self.kind)

    @model_validator(mode="before")
    @classmethod
    def _unset_null_options(cls, value: Any) -> Any:
        """Remove options that are null, if the loss is built in."""
        return without_nulls(value, LOSSES, cls.model_fields["kind"].default)


class BatchWarmup(ConfigSection):
    """Growth of the step from a fraction of its size to its full size."""

    steps: Annotated[int, Field(ge=1, le=10**6)]
    """Number of steps in which the size grows linearly."""

    start: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Size of the first step, as a fraction of the full size."""


class TrainSection(ConfigSection):
    """Keys of `train`."""

    # Only one key of each pair can be set, because one key determines the other.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = (
        alternatives(("epochs",), ("steps",))
        | alternatives(("warmup_ratio",), ("warmup_steps",))
        | alternatives(("tokens_per_step",), ("packs_per_step",), ("samples_per_step",))
    )

    steps: PositiveInt = 1000
    """Number of optimizer steps in the run."""

    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Number of times that the run reads each row, instead of `steps`. All rows are read once before the run, to count
    the packs (docs/how-to/data.md)."""

    packs_per_step: Count = 8
    """Number of packs in each optimizer step, over all ranks. This is the global batch size."""

    tokens_per_step: Annotated[int, Field(ge=2, le=2**50)] | None = None
    """Global batch size in tokens, instead of `packs_per_step`. It must be a multiple of `data.pack_tokens`."""

    samples_per_step: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Global batch size in samples, instead of `packs_per_step`. A preference pair is one sample, and a row that is
    split gives several. The number of packs then differs between steps."""

    batch_warmup: BatchWarmup | None = None
    """Smaller steps at the start of the run, which grow to `packs_per_step`, `tokens_per_step` or `samples_per_step`.
    Default: all steps have the same size."""

    micro_batch: Count = 1
    """Number of packs in each forward pass of a rank. More packs use the device better and need more memory."""

    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    """Dtype of the forward and backward passes. `bf16` keeps fp32 master weights and reduces gradients in fp32. Use
    `fp64` only to compare results on CPUs. Default: `bf16` on accelerators, `fp32` on CPUs."""

    lr: LearningRate = 3e-4
    """Peak learning rate."""

    schedule: Annotated[Text, built_in_or_plugin(SCHEDULES, "schedule")] = "cosine"
    """Learning rate after warmup: `constant`; `linear` or `cosine` (decay to `min_lr_ratio`); `wsd`
    (warmup-stable-decay); or `package.module:function` of a plugin. The function returns the learning rate for (train
    config, step)."""

    warmup_steps: Steps = 0
    """Number of steps in which the learning rate rises linearly from zero to its peak."""

    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of all steps that are warmup steps, rounded up, instead of `warmup_steps`."""

    decay_steps: Steps = 0
    """Number of steps of linear decay at the end of the schedule `wsd`. With 0, the learning rate decays in the last
    fifth of the run."""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate, as a fraction of the peak learning rate."""

    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global norm of the gradients. Larger gradients are scaled down to it. 0 disables clipping."""

    losses: list[LossSettings] = Field([LossSettings(kind="cross_entropy")])
    """Losses of the run. The total loss is their weighted sum, plus the loss of each decoder
    (docs/reference/components.md)."""

    router_bias_rate: LossWeight = 0.0
    """Amount by which each step changes the correction bias of MoE routers, to balance the load of experts without a
    loss. With 0, the bias does not change."""

    compile: bool = False
    """Whether to compile the blocks of the model with torch.compile. Blocks of the same kind share compiled code
    (docs/how-to/speed.md)."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed for random initialization, data order and dropout."""

    deterministic: bool = False
    """Whether repeated runs on the same devices are bitwise equal. torch then uses deterministic algorithms. They may
    be slower, and an operator without such an algorithm is an error (docs/explanation/precision.md)."""

    max_bad_steps: PositiveInt = 3
    """The run stops after this number of consecutive steps with a non-finite loss or gradient. Each such step is
    skipped."""

    @property
    def step_sizes(self) -> StepSizes:
        """Sizes of the steps, in samples with `samples_per_step`, otherwise in packs."""
        size = self.samples_per_step or self.packs_per_step
        if self.batch_warmup is None:
            return StepSizes(size)
        return StepSizes(size, self.batch_warmup.steps, self.batch_warmup.start)

    @property
    def warmup(self) -> int:
        """Number of warmup steps, from `warmup_steps` or `warmup_ratio`."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup_steps

    @model_serializer(mode="wrap")
    def _without_derived(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys whose value is derived from another key, because a saved config must not set both."""
        sources = {"steps": self.epochs, "packs_per_step": self.tokens_per_step or self.samples_per_step}
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if sources.get(key) is None}

    @model_validator(mode="before")
    @classmethod
    def _check_exclusive(cls, value: Any) -> Any:
        """Check that not both keys of a pair are set, such as `epochs` and `steps`."""
        if not isinstance(value, dict):
            return value
        pairs = [("epochs", "steps"), ("warmup_ratio", "warmup_steps")]
        pairs += [("samples_per_step", "packs_per_step"), ("samples_per_step", "tokens_per_step")]
        for key, other in pairs:  # `Config` checks tokens_per_step, because it derives packs_per_step
            if value.get(key) and value.get(other) not in (None, 0):
                raise ValueError(
                    f"train.{key}: train.{other} is also set, and one determines the other. Remove one of them."
                )
        return value

    @model_validator(mode="after")
    def _check_losses(self) -> "TrainSection":
        """Check the options of the losses, and that the losses have different names and use the same kind of rows."""
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
        _check_score_losses(self.losses)
        pairwise = [kind for kind in kinds if kind in PAIRWISE]
        if "kto" in kinds and pairwise:
            raise ValueError(
                f"train.losses: kto needs labeled responses, but {pairwise[0]} needs preference pairs. Remove one of "
                "them."
            )
        return self


def _check_score_losses(losses: Sequence[LossSettings]) -> None:
    """Check the labels of the loss on scores, and that it is only combined with losses on routers.

    Raises:
        ValueError: If the labels are missing or repeated, or if the losses cannot be combined.
    """
    for i, loss in enumerate(losses):
        if loss.kind not in SCORE_LOSSES:
            continue
        others = [other.kind for other in losses if other is not loss and other.kind not in ROUTER_LOSSES]
        if others:
            raise ValueError(
                f"train.losses: {loss.kind} replaces the language model head by a head for scores, so it cannot be "
                f"combined with {others[0]}. Remove one of them."
            )
        if loss.kind != "classification":
            continue
        labels = loss.options.get("labels")
        if labels is None:
            raise ValueError(
                f"train.losses.{i}.options.labels: missing. List the labels, such as [negative, positive]."
            )
        if len(labels) < 2 and loss.options.get("problem") != "multi":
            raise ValueError(f"train.losses.{i}.options.labels: only {len(labels)}. List at least two labels.")
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"train.losses.{i}.options.labels: {label!r} is listed more than once. Remove one.")
