"""Save a checkpoint of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omnizoo.checkpoint.periodic_export import export_step
from omnizoo.checkpoint.save import SaveError, save_checkpoint
from omnizoo.config.errors import TrainingError
from omnizoo.data.loading.loader import merge_states
from omnizoo.training.recompute_budget import saved_choice
from omnizoo.training.recorder import Recorder
from omnizoo.training.setup import RunContext


def save_run(run: RunContext, recorder: Recorder, must_succeed: bool) -> bool:
    """Save a checkpoint of the current step. Collective: all ranks must call it.

    Args:
        run: The run.
        recorder: Prints a warning if saving fails and the run continues.
        must_succeed: Whether a failure ends the run even if `checkpoint.on_save_error` is `continue`.

    Returns:
        Whether the checkpoint was saved.

    Raises:
        TrainingError: If the checkpoint could not be written and the run does not continue.
    """
    recorder.flush()  # metrics.jsonl must contain all steps of the checkpoint
    setup = run.setup
    step = run.state.step
    saved = _state_to_save(run)
    try:
        with run.objective.phases("checkpoint"):
            folder = save_checkpoint(
                run.checkpoint_dir, step, setup.model, run.optimizer, saved, run.mesh, run.config, setup.tokenizer
            )
        run.callbacks.save(step, folder)
    except SaveError as error:
        message = (
            f"the checkpoint of step {step} could not be saved: {error}. "
            f"Earlier checkpoints in {run.checkpoint_dir} are intact."
        )
        if must_succeed or run.config.checkpoint.on_save_error == "stop":
            raise TrainingError(message) from error
        recorder.print(f"warning: {message} Training continues (checkpoint.on_save_error: continue).")
        return False
    return True


def export_weights(run: RunContext, recorder: Recorder) -> None:
    """Write the weights after the current step as a Hugging Face folder. Collective: all ranks must call it.

    Exports are written before the checkpoint of the same step, so a run that is killed during an export resumes from an
    earlier step and repeats it.

    Raises:
        TrainingError: If writing fails and `checkpoint.on_save_error` is `stop`.
    """
    setup, step = run.setup, run.state.step
    settings = run.config.checkpoint.export
    assert settings is not None
    assert setup.published_keys is not None
    directory = Path(settings.dir) if settings.dir else run.folder.exports
    try:
        with run.objective.phases("checkpoint"):
            folder = export_step(
                directory,
                step,
                setup.model,
                setup.published_keys,
                setup.adapter,
                run.mesh,
                run.config,
                setup.tokenizer,
            )
    except SaveError as error:
        message = f"the weights of step {step} could not be exported to {directory}: {error}."
        if run.config.checkpoint.on_save_error == "stop":
            raise TrainingError(message) from error
        recorder.print(f"warning: {message} Training continues (checkpoint.on_save_error: continue).")
        return
    recorder.print(f"exported the weights of step {step} to {folder}")


def _state_to_save(run: RunContext) -> dict[str, Any]:
    """Return the content of `state.json`. Collective: all ranks must call it."""
    saved = run.setup.identity() | asdict(run.state)
    saved |= saved_choice(run.setup.model, run.config, run.mesh)
    saved["callbacks"] = run.callbacks.state_dict()
    if run.config.train.epochs is not None:
        saved["steps"] = run.config.train.steps
    loader_states = run.mesh.gather(run.steps.state)
    saved["loader"] = merge_states(loader_states) if run.mesh.is_first else None
    return saved
