"""The training loop. It runs and records steps, evaluates and saves at intervals, and stops on request."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from omnizoo.checkpoint.folder import folder_of
from omnizoo.config.schema import Config
from omnizoo.data.loading.lane_stream import LoadingStopped
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh
from omnizoo.reporting.results import LAST_STEP, TrainResult, read_train_result
from omnizoo.reporting.start_clock import StartClock
from omnizoo.training.callbacks.base import Callback
from omnizoo.training.callbacks.dispatcher import Requests, raise_failure
from omnizoo.training.profiling.profiler import Profiler
from omnizoo.training.recorder import Recorder
from omnizoo.training.saving import export_weights, save_run
from omnizoo.training.setup import RunContext, joined_world, load_run_config, prepare_run
from omnizoo.training.startup_table import closing_message, open_recorder
from omnizoo.training.step import train_step
from omnizoo.training.step_metrics import StepTimer, report_unusual_step, step_metrics
from omnizoo.training.stop_signal import StopSignal


def train(
    config: str | Path | Mapping[str, Any] | Config,
    on_failure: Callable[[int, BaseException], None] | None = None,
    *,
    model: nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    eval_data: Any = None,
    callbacks: Sequence[Callback] = (),
    clock: StartClock | None = None,
) -> TrainResult:
    """Train with `config`, starting from the newest checkpoint if there is one.

    Under torchrun, every rank must pass the same objects.

    Args:
        config: Path of a YAML file, a mapping, or a config.
        on_failure: Called with the rank and the error when a rank fails.
        model: Used in place of `model.path` or `model.module`: a Hugging Face model, or a module with the same call
            signature. Training updates a copy. The copy starts from the weights of the model on rank 0.
        tokenizer: Used in place of `model.tokenizer`.
        data: Used in place of `data.sources`: a list of dicts, a `datasets.Dataset` or a torch dataset.
        eval_data: Used in place of `data.eval_sources`.
        callbacks: Callbacks in addition to `log.callbacks`. They are called last, on rank 0 only.
        clock: Measures the duration of the start-up (default: a clock that starts now).

    Returns:
        The final and best metrics, the newest checkpoint, the run folder, and why the run stopped.

    Raises:
        UserError: If the config, the data or the model cannot be used.
        TrainingError: If the run fails later.

    Example:
        >>> result = omnizoo.train("my.yaml", callbacks=[MyCallback()])
        >>> result.metrics["loss"], result.checkpoint, result.stop_reason
    """
    clock = clock or StartClock()
    config = load_run_config(config, model=model, tokenizer=tokenizer, data=data, eval_data=eval_data)
    stop = StopSignal()  # a signal during start-up ends the run after its first step
    joined = joined_world(config, on_failure, stop_requested=lambda: bool(stop))
    with stop, joined as (config, mesh), ExitStack() as resources:
        run = prepare_run(config, mesh, callbacks, stop, clock, resources)
        if run is None:  # the checkpoint is already at the last step, or a signal stopped the run
            return _result(config, mesh, stop.signal or LAST_STEP)
        with (
            open_recorder(run, clock) as recorder,
            Profiler(run.folder, run.objective, recorder.print, run.state.step) as profiler,
        ):
            stop_reason = stopped_at_start(run, recorder) or run_steps(run, recorder, profiler)
        return _result(config, mesh, stop_reason)


def _result(config: Config, mesh: Mesh, stop_reason: str) -> TrainResult:
    """Return the result of the run as rank 0 reads it from the run folder. Collective: all ranks must call it."""
    local = sync_errors(mesh, lambda: read_train_result(config, stop_reason) if mesh.is_first else None)
    result: TrainResult = mesh.from_first(local)
    return result


def run_steps(run: RunContext, recorder: Recorder, profiler: Profiler) -> str:
    """Train until the last step, or until a signal or a callback requests to stop. Returns the reason of the end."""
    config, state, data = run.config, run.state, run.first_step
    timer = StepTimer(run.prepared_at)
    while True:
        timer.data_ready()
        result = train_step(run.objective, run.optimizer, data, state.step + 1, stop=run.stop_requested)
        timer.step_done()
        state.advance(data, result)
        report_unusual_step(run, recorder, data, result)
        metrics = step_metrics(run, data, result, timer)

        # At intervals: evaluate the same held-out packs, and generate responses to the same held-out prompts.
        evaluation = None
        if config.evaluation.is_due(state.step):
            evaluation = run.evaluator.run(state.step, recorder)
        with run.objective.phases("record"):
            recorder.step(state.step, metrics | (evaluation or {}))
        requests = Requests()
        if evaluation is not None:
            run.callbacks.evaluation(state.step, evaluation)
            requests = run.callbacks.sync_requests(run.mesh)
        state.check_bad_steps(config.train.max_bad_steps, run.folder)

        # Save at intervals, and always after the last step.
        is_stopped = result.stop or requests.stop
        is_last = state.step == config.train.steps or is_stopped
        is_saved = False
        if config.checkpoint.exports_at(state.step):
            export_weights(run, recorder)
        if is_last or requests.save or config.checkpoint.is_due(state.step):
            is_saved = save_run(run, recorder, must_succeed=is_last)
        if is_last:
            return finish(run, recorder, is_stopped)
        profiler.after(state.step)
        timer.wait_for_data()
        try:
            data = run.steps.next()
        except LoadingStopped:  # a signal arrived while loader workers were slow or stuck
            if not is_saved:
                save_run(run, recorder, must_succeed=True)
            return finish(run, recorder, is_stopped=True)


def stopped_at_start(run: RunContext, recorder: Recorder) -> str:
    """Return the callback that stopped the run in `on_start`, such as early stopping without patience left; or ""."""
    requests = run.callbacks.sync_requests(run.mesh)
    raise_failure(requests)
    stopped_by = ""
    if requests.stop:
        stopped_by = run.callbacks.stopped_by or "a callback"  # its name is known on rank 0
        recorder.print(f"nothing to do: {stopped_by} stopped the run at step {run.state.step}")
        run.callbacks.end("stopped")
        raise_failure(run.callbacks.sync_requests(run.mesh))
    return stopped_by


def finish(run: RunContext, recorder: Recorder, is_stopped: bool) -> str:
    """Call `on_end` of all callbacks, raise an error if a callback failed, and print where the results are.

    Returns:
        Why the run ended: "last step", or the signal or callback that stopped it.
    """
    callbacks = run.callbacks
    if callbacks.failure:
        callbacks.end("failed", callbacks.failure)
    callbacks.end("stopped" if is_stopped else "done")  # has no effect on a run that failed
    checkpoint = folder_of(run.checkpoint_dir, run.state.step)
    raise_failure(callbacks.sync_requests(run.mesh), f"; checkpoint {checkpoint} is complete")
    stopped_by = run.stop.signal or callbacks.stopped_by or "a signal to another rank"
    recorder.print(closing_message(run, stopped_by if is_stopped else None))
    return stopped_by if is_stopped else LAST_STEP
