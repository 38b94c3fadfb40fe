"""Keys of `evaluation`: held-out losses, generated responses, metrics, early stopping."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, MetricName, NamedSettings, PositiveInt, Steps, Text

METRICS = ("accuracy", "exact_match")


class MetricSettings(NamedSettings):
    kind: Annotated[str, built_in_or_plugin(METRICS, "metric")]
    """`accuracy` of the next token, `exact_match` of responses, or your own `package.module:function` of an
    `omnizoo.Answer` (docs/evaluation.md)"""

    options: dict[str, Any] = Field({})
    """further arguments of your function"""

    name: MetricName | None = None
    """the metric is `eval/NAME`; default: the kind, or the name of your function"""

    higher_is_better: bool = True
    """direction of the metric for `checkpoint.best` and `evaluation.early_stop`"""

    @property
    def label(self) -> str:
        return f"eval/{self.name or self.kind.rpartition(':')[2]}"

    @property
    def is_of_answers(self) -> bool:
        return self.kind != "accuracy"

    @model_validator(mode="after")
    def _check_options(self) -> "MetricSettings":
        if self.options and self.kind in METRICS:
            raise ValueError(f"options are arguments of a function of your own; {self.kind} has none")
        return self


class EarlyStopSettings(ConfigSection):
    metric: Text = "eval/loss"
    """metric of evaluations that must improve; lower is better, unless `evaluation.metrics` sets `higher_is_better`"""

    patience: PositiveInt = 3
    """number of evaluations in a row without improvement that ends the run"""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """minimum change that counts as an improvement"""


class EvaluationSection(ConfigSection):
    every: Steps = 0
    """steps between evaluations on `data.eval_sources`; 0: never"""

    packs: PositiveInt = 16
    """number of held-out packs, the same ones at each evaluation; divided between sources by weight, at least one
    each"""

    early_stop: EarlyStopSettings | None = None
    """end the run when evaluations stop improving: `{patience: 3}`; default: never"""

    samples: Annotated[int, Field(ge=0, le=10**6)] = 0
    """number of held-out rows for which the model generates a response at each evaluation; responses are written to
    `samples.jsonl` and to the report (docs/evaluation.md)"""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = 64
    """maximum number of tokens of a generated response"""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """sampling temperature, with random numbers from `train.seed`; 0: greedy decoding"""

    metrics: list[MetricSettings] = Field([])
    """metrics in addition to the losses: `accuracy`, `exact_match`, your own `package.module:function`, or `{kind,
    options, name, higher_is_better}`"""

    @model_validator(mode="after")
    def _check_metrics(self) -> "EvaluationSection":
        for i, metric in enumerate(self.metrics):
            if metric.is_of_answers and not self.samples:
                raise ValueError(
                    f"evaluation.metrics.{i} ({metric.kind}) needs generated responses, but evaluation.samples is 0; "
                    "set the number of held-out rows to generate responses for"
                )
            if metric.label == "eval/loss" or metric.label in [other.label for other in self.metrics[:i]]:
                raise ValueError(f"evaluation.metrics.{i}: {metric.label} is there already; give it another `name`")
        return self

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after `step`."""
        return self.every > 0 and step % self.every == 0

    def higher_is_better(self, metric: str) -> bool:
        """Whether higher values of a metric are better. Lower losses are better."""
        return any(settings.higher_is_better for settings in self.metrics if settings.label == metric)
