"""`train` and `optimizer`: steps, losses, learning rates."""

import math
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from omnizoo.config.doors import check_name
from omnizoo.config.loss_kinds import LOSSES, PAIRWISE, default_name
from omnizoo.config.optimizers import OPTIMIZERS, check_optimizer_options
from omnizoo.config.options import check_options
from omnizoo.config.section import Count, Decay, Rate, Section, Steps, Text, Weight

SCHEDULES = ("constant", "linear", "cosine", "wsd")


class EarlyStop(Section):
    metric: Text = Field(
        "eval/loss",
        description="which metric of evaluations; lower is better, unless `evaluation.metrics` say otherwise",
    )
    patience: Annotated[int, Field(ge=1, le=10**12)] = Field(
        3, description="evaluations in a row without a better one, after which the run ends"
    )
    min_delta: Annotated[float, Field(ge=0, le=1e12)] = Field(
        0.0, description="what is lower (or higher) by no more than this is not better"
    )


class LossPart(Section):
    kind: Text = Field(
        "cross_entropy",
        description="`cross_entropy` of the text; `dpo`, `orpo`, `simpo`, `kto` of preferences (docs/preferences.md); "
        "`grpo` and `gspo` of rollouts (docs/rl.md); "
        "`balance` and `router_z` of a mixture of experts; or `package.module:Class` of your own, a subclass of "
        "`omnizoo.Loss`",
    )
    weight: Weight = Field(1.0, description="what it is multiplied by; 0: a metric only")
    options: dict[str, Any] = Field(
        {},
        description="its arguments (docs/losses.md), or those of your class",
    )
    name: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        None,
        description="its metric is `loss/NAME`; default: `text` for cross_entropy, else its kind, or the name of your "
        "class in lower case",
    )

    @property
    def label(self) -> str:
        return self.name or default_name(self.kind)

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, LOSSES, "loss")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not value.isidentifier():
            raise ValueError(f"{value!r} cannot be the name of a metric; use letters, digits and _")
        return value


class Train(Section):
    steps: Annotated[int, Field(ge=1, le=10**12)] = Field(1000, description="optimizer steps of the whole run")
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        None,
        description="in place of steps: how often every row is read; packs are counted before the run (docs/data.md)",
    )
    global_batch: Count = Field(8, description="packs per optimizer step over all ranks")
    batch_tokens: Annotated[int, Field(ge=2, le=2**50)] | None = Field(
        None, description="in place of global_batch: tokens per optimizer step, a multiple of `data.pack_tokens`"
    )
    micro_batch: Count = Field(1, description="packs per forward pass on one rank")
    lr: Rate = Field(3e-4, description="peak learning rate")
    schedule: Text = Field(
        "cosine",
        description="after warmup: `constant`, to `min_lr_ratio` by a line (`linear`) or a `cosine`, or `wsd`: "
        "warmup-stable-decay; or `package.module:function` of your own: (train config, step) -> learning rate",
    )
    warmup_steps: Steps = Field(0, description="steps of linear warmup from zero")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="in place of warmup_steps: share of the run's steps, rounded up"
    )
    decay_steps: Steps = Field(0, description="`wsd` only: steps of linear decay at the end; 0: a fifth of the run")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="last learning rate / peak")
    grad_clip: Annotated[float, Field(ge=0)] = Field(1.0, description="largest global gradient norm; 0: no clipping")
    losses: list[LossPart] = Field(
        [LossPart(kind="cross_entropy")],
        description="what is minimised, besides the loss of each decoder: the sum of these, each by its weight "
        "(docs/losses.md)",
    )
    compile: bool = Field(
        False,
        description="compile the blocks of the model by torch.compile, one kind of block at a time (docs/speed.md)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="initial weights, data order and dropout")
    max_bad_steps: Annotated[int, Field(ge=1, le=10**12)] = Field(
        3, description="stop after this many skipped (non-finite) steps in a row"
    )
    eval_every: Steps = Field(0, description="steps between held-out evaluations; 0: never")
    eval_packs: Annotated[int, Field(ge=1, le=10**12)] = Field(
        16, description="packs of one evaluation, always the same ones: of each source by its weight, at least one"
    )
    early_stop: EarlyStop | None = Field(
        None, description="end the run once evaluations get no better: `{patience: 3}`; default: never"
    )

    @property
    def warmup(self) -> int:
        """Steps of warmup."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup_steps

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        return check_name(value, SCHEDULES, "schedule")

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What follows from another key is not written: a saved config would have both."""
        derived = {"steps": self.epochs, "global_batch": self.batch_tokens}
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if derived.get(key) is None}

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, value: Any) -> Any:
        pairs = (("epochs", "steps"), ("warmup_ratio", "warmup_steps"))
        for key, other in pairs if isinstance(value, dict) else ():
            if value.get(key) and value.get(other) not in (None, 0):
                raise ValueError(f"train.{key} and train.{other} are both set; one follows from the other, so keep one")
        return value

    @model_validator(mode="after")
    def _known_losses(self) -> "Train":
        places: dict[str, int] = {}
        for i, loss in enumerate(self.losses):
            if loss.kind in LOSSES:
                check_options(loss.kind, LOSSES[loss.kind], loss.options, f"train.losses.{i}.options")
            if (other := places.setdefault(loss.label, i)) != i:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}) is called {loss.label!r}, as train.losses.{other} is; give one of "
                    "them another `name`"
                )
        kinds = [loss.kind for loss in self.losses]
        if "kto" in kinds and (others := [kind for kind in kinds if kind in PAIRWISE]):
            raise ValueError(
                f"train.losses has kto, which reads answers one by one, and {others[0]}, which reads them in pairs; "
                "leave one of them out"
            )
        return self


class Router(Section):
    bias_rate: Weight = Field(
        0.0, description="routers with a correction bias: how far a step moves it towards even load (no loss needed)"
    )


class ParameterGroup(Section):
    """Parameters that are treated otherwise than the rest; what is not given is as for the whole run."""

    match: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        description="glob pattern, or a list of them, over names of parameters: `model.layers.0.*`; the first group "
        "that matches a parameter decides"
    )
    freeze: bool = Field(False, description="do not train them")
    lr: Rate | None = Field(
        None, description="peak learning rate; default: that of their part of the model, or `train.lr`"
    )
    weight_decay: Decay | None = Field(
        None, description="for all of them, norms and biases too; default: `optimizer.weight_decay` and `no_decay`"
    )
    kind: Text | None = Field(None, description="their optimizer, as `optimizer.kind`; default: the run's")
    options: dict[str, Any] = Field({}, description="its arguments; with the run's own kind, added to the run's")

    @property
    def patterns(self) -> list[str]:
        return [self.match] if isinstance(self.match, str) else self.match

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str | None) -> str | None:
        return value and check_name(value, OPTIMIZERS, "optimizer")

    @model_validator(mode="after")
    def _frozen_or_trained(self) -> "ParameterGroup":
        if self.freeze and (self.lr or self.weight_decay or self.kind or self.options):
            raise ValueError("what is frozen has no lr, weight_decay, kind or options; leave them or `freeze` out")
        return self


class Ema(Section):
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999, description="share of the average that is kept when the weights are added to it"
    )
    every: Annotated[int, Field(ge=1, le=10**12)] = Field(1, description="steps between updates of the average")


class Optimizer(Section):
    kind: Text = Field(
        "adamw",
        description="`adamw`, `muon` (hidden matrices by Muon, the rest by AdamW), `adafactor`, `adamw_8bit` (needs "
        "torchao), or `package.module:Class` of your own",
    )
    options: dict[str, Any] = Field(
        {}, description="its arguments: `betas`, `eps`, `momentum`, ...; docs/optimizers.md"
    )
    moments: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of AdamW's two moments; bf16 halves them, and is rounded stochastically "
        "(docs/memory.md)",
    )
    weight_decay: Decay = Field(0.1, description="decoupled weight decay")
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(
        ["norm", "bias", "embedding"], description="parameters that weight decay leaves alone"
    )
    groups: list[ParameterGroup] = Field([], description="parameters, by name, that are treated otherwise")
    ema: Ema | None = Field(
        None,
        description="keep a moving average of the weights: `{decay: 0.999}`; written by the flag `--ema` of export",
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, OPTIMIZERS, "optimizer")

    @model_validator(mode="after")
    def _known_options(self) -> "Optimizer":
        check_optimizer_options(self.kind, self.options, "optimizer.options")
        kinds = {self.kind, *(group.kind for group in self.groups)}
        if self.moments == "bf16" and not kinds & {"adamw", "muon"}:
            raise ValueError(
                f"optimizer.moments: bf16 is for the kinds adamw and muon (for what it leaves to AdamW), and kind is "
                f"{self.kind}; leave it out"
            )
        for name in ("amsgrad", "fused"):
            if self.moments == "bf16" and name in self.options:
                raise ValueError(f"optimizer.options.{name}: cannot be had with optimizer.moments: bf16; leave it out")
        for i, group in enumerate(self.groups):
            check_optimizer_options(group.kind or self.kind, group.options, f"optimizer.groups.{i}.options")
        return self
