"""Keys of `evaluation`: held-out losses, generated responses, metrics, early stopping."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from omnizoo.config.plugins import built_in_or_plugin
from omnizoo.config.sections.base import ConfigSection, MetricName, NamedSettings, PositiveInt, Steps, Text
from omnizoo.config.sections.built_in_options import check_options

# For each built-in metric, the type of each option. All options are required.
METRICS: dict[str, dict[str, Any]] = {
    "accuracy": {},
    "exact_match": {},
    "clip_score": {"path": Text},
    "fid": {"path": Text},
}
LOWER_IS_BETTER = ("fid",)
HIGHER_IS_BETTER = ("accuracy", "margin", "f1")  # metrics of losses, such as `eval/loss/dpo/accuracy`


class MetricSettings(NamedSettings):
    """Settings of a metric."""

    kind: Annotated[str, built_in_or_plugin(METRICS, "metric")]
    """`accuracy` is the share of targets whose token the model predicts. `exact_match` is the share of generated
    responses that equal the expected one. `clip_score` and `fid` measure generated images and clips with a model that
    the option `path` names. `package.module:function` of a plugin receives an `omnizoo.Answer`
    (docs/how-to/evaluation.md)."""

    options: dict[str, Any] = Field({})
    """Options of a built-in metric, or further keyword arguments of a plugin."""

    name: MetricName | None = None
    """Name of the metric. It is logged as `eval/NAME`. Default: the kind, or the name of the plugin function."""

    higher_is_better: bool | None = None
    """Whether higher values of the metric are better. `checkpoint.best` and `evaluation.early_stop` use it. Default:
    true, except for `fid`."""

    @property
    def label(self) -> str:
        """Name of the metric in logs, such as `eval/accuracy`."""
        return f"eval/{self.name or self.kind.rpartition(':')[2]}"

    @property
    def improves_upwards(self) -> bool:
        """Whether higher values are better."""
        return self.kind not in LOWER_IS_BETTER if self.higher_is_better is None else self.higher_is_better

    @property
    def is_of_answers(self) -> bool:
        """Whether the metric needs generated responses. `accuracy` is computed from the logits of held-out packs."""
        return self.kind != "accuracy"

    @model_validator(mode="after")
    def _check_options(self) -> "MetricSettings":
        """Check the options of a built-in metric."""
        known = METRICS.get(self.kind)
        if known is None:
            return self
        check_options(self.kind, known, self.options, "options")
        missing = [name for name in known if name not in self.options]
        if missing:
            raise ValueError(f"options.{missing[0]}: {self.kind} needs it. Set it, for example to a model folder.")
        return self


class EarlyStopSettings(ConfigSection):
    """Settings of early stopping."""

    metric: Text = "eval/loss"
    """Evaluation metric that must improve. Lower losses are better; for other metrics, `higher_is_better` decides."""

    patience: PositiveInt = 3
    """The run ends after this number of consecutive evaluations without an improvement."""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Minimum change of the metric that counts as an improvement."""


class EvaluationSection(ConfigSection):
    """Keys of `evaluation`."""

    every: Steps = 0
    """Number of steps between evaluations on `data.eval_sources`. 0 disables evaluations."""

    packs: PositiveInt = 16
    """Number of held-out packs. Every evaluation uses the same ones. They are divided among the held-out sources by
    weight, with at least one pack for each source. More packs make the losses less noisy and evaluations slower."""

    early_stop: EarlyStopSettings | None = None
    """Ends the run when a metric stops improving, for example `{patience: 3}`. Default: the run does not end early."""

    samples: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Number of held-out rows for which each evaluation generates responses. The responses are written to
    `samples.jsonl` and the report (docs/how-to/evaluation.md). 0 generates none."""

    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = 64
    """Maximum number of tokens in a generated response."""

    batch: PositiveInt = 8
    """Maximum number of responses that rank 0 generates at once. A larger value is faster and needs more memory. The
    responses do not depend on it."""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Sampling temperature of generated responses. 0 selects greedy decoding; otherwise, the random numbers depend on
    `train.seed`."""

    pipeline: dict[str, Any] = Field({})
    """Arguments of the pipeline with which a diffusion transformer generates samples, such as `{num_inference_steps:
    20}`. Height, width, number of frames and length of the text are those of `data.shapes` and `data.text_tokens`.
    Default: the arguments of the family."""

    metrics: list[MetricSettings] = Field([])
    """Metrics to compute in addition to the losses. Each entry is a built-in metric, `package.module:function` of a
    plugin, or a mapping `{kind, options, name, higher_is_better}`."""

    @model_validator(mode="after")
    def _check_metrics(self) -> "EvaluationSection":
        """Check that responses are generated if a metric needs them, and that all metrics have different names."""
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
        """Whether an evaluation follows `step`."""
        return self.every > 0 and step % self.every == 0

    def higher_is_better(self, metric: str) -> bool:
        """Whether higher values of the metric with this label are better. Return False for losses."""
        for settings in self.metrics:
            if settings.label == metric:
                return settings.improves_upwards
        return metric.rpartition("/")[2] in HIGHER_IS_BETTER
