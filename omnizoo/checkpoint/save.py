"""Save and load the complete state of a run. A checkpoint can be loaded on any layout."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from omnizoo.checkpoint import folder, manifest, retention, tensor_files
from omnizoo.checkpoint.resume import StartingPoint
from omnizoo.config.errors import UserError, first_line, named_line
from omnizoo.config.schema import Config
from omnizoo.config.yaml_file import save_config
from omnizoo.modalities.processor_files import processor_files
from omnizoo.models.adapters.base_identity import check_base_identity
from omnizoo.models.diffusion.expert_pair import save_denoiser_config
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.export_files import write_processor
from omnizoo.models.media.composed import save_model_config
from omnizoo.models.read_config import tokenizer_folder
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are not affected."""


def save_checkpoint(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    mesh: Mesh,
    config: Config,
    tokenizer: Any,
) -> Path:
    """Write a checkpoint. Collective: all ranks must call it.

    Saving is atomic. Afterwards, checkpoints beyond `checkpoint.keep` are removed.

    Args:
        directory: Folder of the checkpoints of the run.
        step: Number of completed steps. It is part of the checkpoint's name.
        model: The sharded model.
        optimizer: The optimizer of the model.
        state: JSON-serializable state; only that of rank 0 is written. `state["run"]` is the id of the run
            (`StartingPoint.run`).
        mesh: The device mesh.
        config: The config of the run.
        tokenizer: Tokenizer to store for exports.

    Returns:
        The folder of the checkpoint.

    Raises:
        SaveError: If writing failed on any rank. The error is raised on all ranks.
    """
    partial = folder.partial_of(directory, step)
    final = folder.folder_of(directory, step)

    def prepare() -> None:
        if mesh.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)

    def write() -> dict[str, manifest.File]:
        named = tensor_files.model_tensors(model) | tensor_files.optimizer_tensors(model, optimizer)
        return tensor_files.write(named, partial / "tensors")

    def finish() -> None:
        if mesh.is_first:
            folder.write_json(partial / "state.json", {"step": step, **state})
            save_config(config, partial / "config.yaml")
            write_model_files(model, tokenizer, config, partial / "model")
            written = {f"tensors/{name}": file for files in shards for name, file in files.items()}
            folder.commit(partial, final, step, state["run"], written)

    on_all_ranks(mesh, prepare, partial)
    shards = mesh.gather(on_all_ranks(mesh, write, partial))
    on_all_ranks(mesh, finish, partial)
    if mesh.is_first:
        try:
            retention.prune(directory, config.checkpoint.keep, final)
        except OSError as error:
            logger.warning("checkpoint.keep: older checkpoints in %s could not be removed: %s", directory, error)
    return final


def write_model_files(model: nn.Module, tokenizer: Any, config: Config, out: Path) -> None:
    """Write the files of a Hugging Face folder in addition to weights: config, tokenizer, processor."""
    if isinstance(model, PreTrainedModel):
        save_model_config(model, out)
        write_processor(model, out, bool(getattr(tokenizer, "chat_template", None)))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(out)
    if denoiser_recipe(model) is not None:
        save_denoiser_config(model, out)
        return
    tokenizer.save_pretrained(out)
    # Add processor files from the folder of the tokenizer, if the model did not write its own.
    for file in processor_files(tokenizer_folder(config.model)):
        if not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def load_checkpoint(
    origin: StartingPoint, model: nn.Module, optimizer: torch.optim.Optimizer | None, base: str | None = None
) -> dict[str, Any]:
    """Load the checkpoint that a run starts from. It may have been written on any layout.

    Collective: all ranks must call it.

    Args:
        origin: The starting point of the run, from `find_checkpoint`.
        model: The sharded model to fill.
        optimizer: The optimizer to fill; None to load weights only.
        base: Hash of an adapter's base model. The hash in the checkpoint must be the same.

    Returns:
        The `state` that `save_checkpoint` received; empty for a new run.

    Raises:
        UserError: If the checkpoint cannot be read, or belongs to another base model.
    """
    if origin.checkpoint is None:
        return {}
    named = tensor_files.model_tensors(model)
    if not origin.weights_only and optimizer is not None:
        named |= tensor_files.optimizer_tensors(model, optimizer)
    with _read_errors(origin.checkpoint):
        tensor_files.read(named, origin.checkpoint / "tensors")
    state = _read_state(origin.checkpoint)
    if base is not None:
        check_base_identity(state.get("adapter", {}).get("base"), base, f"checkpoint {origin.checkpoint}")
    if origin.weights_only:
        if optimizer is not None:
            tensor_files.begin_average(optimizer)
        return {}
    return state


def read_saved_state(origin: StartingPoint) -> dict[str, Any]:
    """Return the `state` of the checkpoint that a run resumes from, without reading tensors. Empty for a new run."""
    if origin.checkpoint is None or origin.weights_only:
        return {}
    return _read_state(origin.checkpoint)


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of `state.json`, or raise a `UserError`."""
    with _read_errors(checkpoint):
        return manifest.read_state(checkpoint, manifest.read(checkpoint))


@contextmanager
def _read_errors(checkpoint: Path) -> Iterator[None]:
    """Context manager: raise a `UserError` if the checkpoint cannot be read."""
    try:
        yield
    except (CheckpointException, SafetensorError, OSError, manifest.Damage) as error:
        raise UserError(
            f"{checkpoint}: the checkpoint cannot be read: {_reason(error)}. Choose another checkpoint."
        ) from error


def on_all_ranks(mesh: Mesh, work: Callable[[], T], partial: Path) -> T:
    """Run `work` on all ranks. If it fails on any rank, remove `partial` and raise a `SaveError` on all ranks."""

    def saving() -> T:
        try:
            return work()
        except (CheckpointException, Exception) as error:  # CheckpointException is a BaseException
            raise SaveError(_reason(error)) from error  # libraries raise errors of any class, even Exception

    try:
        return sync_errors(mesh, saving, SaveError)
    except SaveError:
        if mesh.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    """Return a one-line reason for `error`. If several ranks failed, return the reason of the first rank listed."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {first_line(cause)}"
    return named_line(error)
