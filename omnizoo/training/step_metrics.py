"""Metrics and timing of a step, and reports about unusual steps."""

import time
from collections.abc import Iterator

from omnizoo.balancing.step_data import StepData
from omnizoo.data.loading.loader import ROWS_READ
from omnizoo.ops.device import memory_gb, peak_flops
from omnizoo.training.recorder import Recorder
from omnizoo.training.setup import RunContext
from omnizoo.training.step import StepResult


class StepTimer:
    """Measures the duration of a step and the wait for its data. All times are in seconds."""

    def __init__(self, started_at: float) -> None:
        """Start the timer. `started_at` is the `time.perf_counter()` at which the wait for the first data began."""
        self._started_at = started_at
        self.data_wait = 0.0
        self.total = 0.0  # includes the wait for data

    def wait_for_data(self) -> None:
        """Start the measurement of a step. A step begins with the wait for its data."""
        self._started_at = time.perf_counter()

    def data_ready(self) -> None:
        """End the wait for data."""
        self.data_wait = time.perf_counter() - self._started_at

    def step_done(self) -> None:
        """End the measurement of a step."""
        self.total = time.perf_counter() - self._started_at


def step_metrics(run: RunContext, data: StepData, result: StepResult, timer: StepTimer) -> dict[str, float | None]:
    """Return the metrics of a step under the names used in `metrics.jsonl`."""
    config, mesh = run.config, run.mesh
    num_rows = sum(len(source) for source in run.reader.sources)
    metrics: dict[str, float | None] = {
        **result.metrics(),
        "loss": result.loss if data.totals.has_targets else None,
        "tokens": data.tokens,
        "samples": data.totals.samples,
        "packs": data.totals.packs,
        "tokens_seen": run.state.tokens_seen,
        "tokens_per_sec": data.tokens / timer.total,
        "mfu": _mfu(run, data.totals.flops / timer.total),
        "memory_gb": memory_gb(mesh.device),
        "data_wait": timer.data_wait / timer.total,
        "fill": data.tokens / (_num_packs(run, data) * config.data.pack_tokens),
        "imbalance": max(data.imbalance.values()),
    }
    if run.objective.ports:
        metrics |= {f"imbalance/{part}": ratio for part, ratio in data.imbalance.items()}
    metrics["bad_steps"] = run.state.bad_steps
    metrics |= {name: count for name, count in data.counters.items() if name != ROWS_READ}
    metrics["epoch"] = data.counters[ROWS_READ] / num_rows
    return metrics


def _num_packs(run: RunContext, data: StepData) -> int:
    """Return the number of packs in the step, including packs whose samples were all dropped."""
    train = run.config.train
    if train.samples_per_step is not None:
        return max(1, data.totals.packs)
    return train.step_sizes.of_step(run.state.step - 1)


def _mfu(run: RunContext, flops_per_second: float) -> float | None:
    """Return the model FLOPs utilization; None if the peak of the device is unknown."""
    peak = peak_flops(run.mesh.device, run.config.train.precision)
    return flops_per_second / (peak * run.mesh.layout.world) if peak else None


def report_unusual_step(run: RunContext, recorder: Recorder, data: StepData, result: StepResult) -> None:
    """Print and record a skipped step, bad rows, over-long samples and a step without targets.

    Collective: all ranks must call it.
    """
    step = run.state.step
    if not result.finite:
        recorder.bad_step(step, result.loss, result.grad_norm, _sample_names(run, data))
        recorder.print(
            f"step {step} skipped: loss {result.loss}, grad norm {result.grad_norm}. "
            f"Its samples are listed in {run.folder.bad_steps}."
        )
    for line in _warnings(run, data):
        recorder.print(line)
    if data.bad_rows:
        recorder.bad_rows(step, sorted(set(data.bad_rows)))


def _sample_names(run: RunContext, data: StepData) -> list[str]:
    """Return the names of all ranks' samples. Collective: all ranks must call it."""
    local_names = [name for batch in data.micro_batches for name in batch.sample_ids]
    names_by_rank = run.mesh.gather(local_names if run.mesh.sp_rank == 0 else [])
    return [name for names in names_by_rank for name in names]


def _warnings(run: RunContext, data: StepData) -> Iterator[str]:
    """Yield warnings about a step without targets and about over-long samples."""
    if not data.totals.has_targets:
        yield f"step {run.state.step} has no targets, so its loss is undefined"
    for warning in run.overlong.new_warnings(data.counters):
        yield f"warning: {warning}"
