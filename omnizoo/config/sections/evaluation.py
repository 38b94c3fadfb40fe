"""Keys of `evaluation`: held-out losses, generated responses, metrics, early stopping."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, MetricName, NamedSettings, PositiveInt, Steps, Text

METRICS = ("accuracy", "exact_match")


class MetricSettings(NamedSettings):
    """Settings of a metric."""

    kind: Annotated[str, built_in_or_plugin(METRICS, "metric")]
    """`accuracy` of the next token, `exact_match` of responses, or `package.module:function` of a plugin that receives
    an `omnizoo.Answer` (docs/how-to/evaluation.md)"""

    options: dict[str, Any] = Field({})
    """further arguments of the plugin function"""

    name: MetricName | None = None
    """NAME in the name of the metric, `eval/NAME`; default: the kind, or the name of the plugin function"""

    higher_is_better: bool = True
    """whether higher values are better, for `checkpoint.best` and `evaluation.early_stop`"""

    @property
    def label(self) -> str:
        """Name of the metric in logs: `eval/NAME`."""
        return f"eval/{self.name or self.kind.rpartition(':')[2]}"

    @property
    def is_of_answers(self) -> bool:
        """Whether the metric needs generated responses. `accuracy` is computed from the loss on held-out packs."""
        return self.kind != "accuracy"

    @model_validator(mode="after")
    def _check_options(self) -> "MetricSettings":
        if self.options and self.kind in METRICS:
            raise ValueError(f"options: {self.kind} has no options. Remove them.")
        return self


class EarlyStopSettings(ConfigSection):
    """Settings of early stopping."""

    metric: Text = "eval/loss"
    """evaluation metric that must improve; lower values are better, unless the metric has `higher_is_better`"""

    patience: PositiveInt = 3
    """number of consecutive evaluations without improvement after which the run ends"""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """minimum change that counts as an improvement"""


class EvaluationSection(ConfigSection):
    """Keys of `evaluation`."""

    every: Steps = 0
    """steps between evaluations on `data.eval_sources`; 0: never"""

    packs: PositiveInt = 16
    """number of held-out packs, the same at each evaluation, divided among the sources by weight, at least one per
    source"""

    early_stop: EarlyStopSettings | None = None
    """condition to end the run when evaluations stop improving, such as `{patience: 3}`; default: never"""

    samples: Annotated[int, Field(ge=0, le=10**6)] = 0
    """number of held-out rows to generate responses for at each evaluation, written to `samples.jsonl` and the report
    (docs/how-to/evaluation.md); 0: none"""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = 64
    """maximum number of tokens of a generated response"""

    batch: PositiveInt = 8
    """maximum number of responses to generate at once on rank 0; more are faster and need more memory. The responses do
    not depend on it"""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """sampling temperature, with random numbers from `train.seed`; 0: greedy decoding"""

    metrics: list[MetricSettings] = Field([])
    """metrics in addition to the losses: `accuracy`, `exact_match`, `package.module:function` of a plugin, or `{kind,
    options, name, higher_is_better}`"""

    @model_validator(mode="after")
    def _check_metrics(self) -> "EvaluationSection":
        for i, metric in enumerate(self.metrics):
            if metric.is_of_answers and not self.samples:
                raise ValueError(
                    f"evaluation.metrics.{i}: {metric.kind} needs generated responses, but evaluation.samples is 0. "
                    "Set evaluation.samples to the number of rows to generate responses for."
                )
            earlier_labels = [other.label for other in self.metrics[:i]]
            if metric.label in ("eval/loss", *earlier_labels):
                raise ValueError(f"evaluation.metrics.{i}: {metric.label} is already used. Set another `name`.")
        return self

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after `step`."""
        return self.every > 0 and step % self.every == 0

    def higher_is_better(self, metric: str) -> bool:
        """Whether higher values of a metric are better. This is false for losses."""
        return any(settings.higher_is_better for settings in self.metrics if settings.label == metric)
