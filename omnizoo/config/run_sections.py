"""`parallel`, `checkpoint`, `evaluation` and `log`: how a run is laid out, kept, looked at and told of."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from omnizoo.config.doors import check_name, check_own_name
from omnizoo.config.section import Count, Section, Steps, Text

METRICS = ("accuracy", "exact_match")
MOST_PROFILED = 50  # steps; a trace of more would not open in a browser


class RecomputeBudget(Section):
    budget: Annotated[float, Field(gt=0, le=1e6)] = Field(
        description="what activations of blocks may take on a rank: up to 1, a share of its memory; above, GiB"
    )


class Parallel(Section):
    dp_replicate: Count = Field(1, description="copies of the sharded model (HSDP)")
    dp_shard: Annotated[int, Field(le=2**20)] = Field(
        -1, description="ranks with packs of their own that share one copy (FSDP2); -1: what is left"
    )
    ulysses: Count = Field(
        1, description="ranks that share a pack and split its attention by heads (sequence parallel, all-to-all)"
    )
    ring: Count = Field(
        1, description="ranks that share a pack and pass keys and values around (sequence parallel, any head count)"
    )
    ep: Count = Field(1, description="ranks that split the experts; divides dp_shard x ulysses x ring")
    overlap: bool = Field(
        True,
        description="start the all-to-alls of query, key and value together; false: one by one, same numbers",
    )
    precision: Literal["fp32", "fp64", "bf16"] = Field(
        "fp32",
        description="bf16 keeps fp32 master weights and reduces gradients in fp32, and is what accelerators do unless "
        "this says otherwise; fp64 is for proofs on the CPU",
    )
    recompute: Literal["none", "full", "selective"] | RecomputeBudget = Field(
        "none",
        description="recompute activations in backward: whole blocks, or all but attention, matmuls and all-to-alls; "
        "or `{budget: 40}`: as few blocks as it allows, by costs that are measured at the start (docs/memory.md)",
    )
    offload: list[Literal["activations", "optimizer", "parameters"]] = Field(
        [],
        max_length=8,
        description="what is kept in the memory of the host instead of the device's: `activations` come back one block "
        "ahead in backward, the state of the `optimizer` is away but for the update, `parameters` come when they are "
        "gathered, and the host updates them: gradients and the optimizer's state are there, too (docs/memory.md)",
    )
    tile_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None,
        description="feed-forwards and experts compute at most so many tokens at a time, and once more in backward: "
        "what they keep does not grow with the pack (docs/memory.md); default: all at once",
    )
    reshard_after_forward: bool | None = Field(
        None,
        description="free gathered weights between forward and backward: less memory, one more all-gather; default: "
        "unless all of them take less than a sixteenth of the memory",
    )
    reduce_each_micro_batch: bool | None = Field(
        None,
        description="reduce-scatter after every micro-batch: less memory, more communication; default: on accelerators "
        "(on CPUs once a step)",
    )

    @model_validator(mode="after")
    def _shard_is_a_size(self) -> "Parallel":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(f"parallel.dp_shard is {self.dp_shard}; give a positive number, or -1 for what is left")
        return self


class Checkpoint(Section):
    every: Steps = Field(0, description="steps between checkpoints; 0: only at the end of the run")
    keep: Annotated[int, Field(ge=1, le=10**12)] = Field(2, description="newest complete checkpoints to keep")
    dir: Text | None = Field(None, description="where checkpoints go; default: `<log.dir>/checkpoints`")
    resume: Text = Field(
        "auto",
        description="`auto`: the newest intact one in `dir`; `never`; a checkpoint folder; or `weights:PATH`: a new "
        "run from the weights of a checkpoint or of a run",
    )
    best: Text | None = Field(
        None,
        description="a metric of evaluations, `eval/loss`: save after each evaluation with the best one so far, and "
        "keep that checkpoint besides the newest `keep`",
    )
    on_save_error: Literal["stop", "continue"] = Field(
        "stop",
        description="a save fails (disk full ...): stop with an error, or warn and train on; older ones stay intact",
    )

    @model_validator(mode="after")
    def _weights_of_whom(self) -> "Checkpoint":
        if self.resume in ("", "weights", "weights:"):
            raise ValueError(
                f"checkpoint.resume is {self.resume!r}; expected auto, never, a checkpoint folder, or weights:PATH "
                "with the checkpoint or run folder that the weights are of"
            )
        return self


class MetricPart(Section):
    kind: str = Field(
        description="`accuracy` of the next token; `exact_match` of answers; or `package.module:function` of your own, "
        "of an `omnizoo.Answer` (docs/evaluation.md)"
    )
    options: dict[str, Any] = Field({}, description="further arguments of your function")
    name: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        None, description="the metric is `eval/NAME`; default: its kind, or the name of your function"
    )
    higher_is_better: bool = Field(True, description="for `checkpoint.best` and `train.early_stop`")

    @property
    def label(self) -> str:
        return f"eval/{self.name or self.kind.rpartition(':')[2]}"

    @property
    def is_of_answers(self) -> bool:
        return self.kind != "accuracy"

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name alone is enough where there is nothing else to say."""
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, METRICS, "metric")

    @model_validator(mode="after")
    def _plain_name(self) -> "MetricPart":
        if self.name is not None and not self.name.isidentifier():
            raise ValueError(f"{self.name!r} cannot be the name of a metric; use letters, digits and _")
        if self.options and self.kind in METRICS:
            raise ValueError(f"options are arguments of a function of your own; {self.kind} has none")
        return self


class Evaluation(Section):
    samples: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0,
        description="held-out rows that are put to the model as questions at each evaluation; answers are in "
        "`samples.jsonl` and in the report (docs/evaluation.md)",
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(64, description="most tokens of an answer")
    temperature: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="of what is drawn, from `train.seed`; 0: always the likeliest"
    )
    metrics: list[MetricPart] = Field(
        [],
        description="figures besides the losses: `accuracy`, `exact_match`, `package.module:function` of your own, or "
        "`{kind, options, name, higher_is_better}`",
    )

    @model_validator(mode="after")
    def _of_answers(self) -> "Evaluation":
        for i, metric in enumerate(self.metrics):
            if metric.is_of_answers and not self.samples:
                raise ValueError(
                    f"evaluation.metrics.{i} ({metric.kind}) is of answers, and evaluation.samples is 0: there are "
                    "none; set how many held-out rows are to be answered"
                )
            if metric.label == "eval/loss" or metric.label in [other.label for other in self.metrics[:i]]:
                raise ValueError(f"evaluation.metrics.{i}: {metric.label} is there already; give it another `name`")
        return self

    def higher_is_better(self, metric: str) -> bool:
        """Of any metric of evaluations; losses are better when they are lower."""
        return any(part.higher_is_better for part in self.metrics if part.label == metric)


class CallbackPart(Section):
    kind: str = Field(description="`package.module:Class` of your own, a subclass of `omnizoo.Callback`")
    options: dict[str, Any] = Field({}, description="arguments of the class")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name alone is enough where there are no options."""
        kind = value.get("kind") if isinstance(value, dict) else value
        if isinstance(kind, str):
            check_own_name(kind, "a class; expected `package.module:Class`")
        return {"kind": value} if isinstance(value, str) else value


class Log(Section):
    dir: Text = Field("runs/default", description="the run folder: config, metrics, TensorBoard, checkpoints, report")
    every: Annotated[int, Field(ge=1, le=10**12)] = Field(
        1, description="steps between console lines where there is no terminal"
    )
    profile: Text | None = Field(
        None,
        description="`first:last`, such as 10:12: the steps that are profiled, into `profile/` of the run folder "
        "(docs/profiling.md)",
    )
    profile_ranks: Literal["first", "all"] = Field(
        "first", description="whose traces are kept; all ranks are measured and summed up either way"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: Text | None = Field(None, description="W&B project to log to (needs `pip install omnizoo[wandb]`)")
    callbacks: list[CallbackPart] = Field(
        [],
        description="code of your own at fixed moments of the run (docs/callbacks.md): `package.module:Class`, or with "
        "arguments `{kind, options}`",
    )

    @field_validator("profile")
    @classmethod
    def _some_steps(cls, value: str | None) -> str | None:
        if value is None:
            return None
        steps = _steps_of(value)
        if not steps or steps.start < 1 or len(steps) > MOST_PROFILED:
            raise ValueError(
                f"profile is {value!r}; expected `first:last`, such as 10:12: steps from 1 on, at most {MOST_PROFILED}"
            )
        return value

    @property
    def profiled(self) -> range | None:
        """The steps of `profile`."""
        return None if self.profile is None else _steps_of(self.profile)


def _steps_of(text: str) -> range:
    found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)
