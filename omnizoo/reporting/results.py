"""Classes of the results that `omnizoo.train`, `omnizoo.evaluate` and `omnizoo.generate` return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnizoo.checkpoint.folder import checkpoints, folder_of, step_of
from omnizoo.checkpoint.retention import read_best
from omnizoo.config.schema import Config
from omnizoo.reporting.metrics_file import read_metrics
from omnizoo.reporting.run_folder import Metrics, RunFolder

LAST_STEP = "last step"  # stop reason of a run that was not stopped early


@dataclass(frozen=True)
class BestMetric:
    """The best value of the metric in `checkpoint.best`, and its checkpoint."""

    metric: str  # name of the metric
    value: float
    step: int  # step of the checkpoint
    checkpoint: Path


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run. It is the same on all ranks."""

    folder: Path  # run folder (`log.dir`)
    checkpoint: Path | None  # newest checkpoint; None if there is none
    step: int  # last finished step
    stop_reason: str  # "last step", or what stopped the run earlier: a signal, `evaluation.early_stop` or a callback
    metrics: Metrics  # metrics of the last step, as in `metrics.jsonl`
    evaluation: Metrics  # metrics of the last evaluation (`eval/...`); empty without evaluations
    best: BestMetric | None  # None without `checkpoint.best`
    exit_code: int = 0  # exit code of `omnizoo train`

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its last step."""
        return self.stop_reason == LAST_STEP


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation. It is the same on all ranks."""

    folder: Path  # output folder
    checkpoint: Path | None  # evaluated checkpoint; None for the initial weights
    step: int  # step of the checkpoint
    metrics: Metrics  # held-out losses and metrics, by name (`eval/...`)
    samples: Sequence[Mapping[str, Any]] = field(default_factory=list)  # prompts and responses, as in `samples.jsonl`
    exit_code: int = 0  # exit code of `omnizoo eval`


@dataclass(frozen=True)
class GeneratedResponse:
    """The response to one prompt."""

    prompt: str  # text of the prompt
    text: str  # text of the response; a media item appears as its modality in brackets
    expected: str | None  # response in the row; None if it has none
    files: Sequence[Path]  # generated media


def read_train_result(config: Config, stop_reason: str) -> TrainResult:
    """Read the result of a run from the files in its folders.

    Args:
        config: The config of the run.
        stop_reason: What ended the run (see `TrainResult.stop_reason`).
    """
    folder = RunFolder(Path(config.log.dir))
    directory = Path(config.checkpoint.dir) if config.checkpoint.dir else folder.checkpoints
    rows = read_metrics(folder.metrics)
    last = dict(rows[-1]) if rows else {}
    evaluated: Metrics = next((row for row in reversed(rows) if "eval/loss" in row), {})
    saved = checkpoints(directory)
    newest = saved[0] if saved else None
    saved_step = 0 if newest is None else step_of(newest) or 0
    return TrainResult(
        folder=folder.root,
        checkpoint=newest,
        step=int(last.pop("step", saved_step)),
        stop_reason=stop_reason,
        metrics=last,
        evaluation={name: value for name, value in evaluated.items() if name.startswith("eval/")},
        best=_read_best(directory, config.checkpoint.best),
    )


def _read_best(directory: Path, metric: str | None) -> BestMetric | None:
    """Return the best value of a metric, as recorded next to the checkpoints; None if there is none."""
    best = read_best(directory) if metric is not None else None
    if best is None or best.metric != metric:
        return None
    return BestMetric(best.metric, best.value, best.step, folder_of(directory, best.step))
