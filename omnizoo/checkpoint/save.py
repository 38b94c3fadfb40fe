"""Saving and loading the whole state of a run, under any layout."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from omnizoo.checkpoint import folder, manifest, tensors
from omnizoo.checkpoint.start import Origin
from omnizoo.config.errors import UserError
from omnizoo.config.load import save_config
from omnizoo.config.schema import Config
from omnizoo.modalities.processor_files import processor_files
from omnizoo.models.base_identity import check_base_identity
from omnizoo.models.build import tokenizer_folder
from omnizoo.models.omni import save_model_config
from omnizoo.models.published_files import write_processor
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Those before it are intact."""


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    mesh: Mesh,
    config: Config,
    tokenizer: Any,
) -> Path:
    """Write checkpoint `step` from all ranks, rank 0's `state` (JSON-able) with it. SaveError on all ranks or none.

    `state["run"]` is the id of the run (`Origin.run`).
    """
    partial, final = folder.partial_of(directory, step), folder.folder_of(directory, step)

    def prepare() -> None:
        if mesh.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)

    def write() -> dict[str, manifest.File]:
        named = tensors.model_tensors(model) | tensors.optimizer_tensors(model, optimizer)
        return tensors.write(named, partial / "tensors")

    def finish() -> None:
        if mesh.is_first:
            folder.write_json(partial / "state.json", {"step": step, **state})
            save_config(config, partial / "config.yaml")
            if isinstance(model, PreTrainedModel):
                save_model_config(model, partial / "model")
                write_processor(model, partial / "model", bool(getattr(tokenizer, "chat_template", None)))
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(partial / "model")
            tokenizer.save_pretrained(partial / "model")
            for file in processor_files(tokenizer_folder(config.model)):  # of a model that has none of its own
                if not (partial / "model" / file.name).exists():
                    shutil.copyfile(file, partial / "model" / file.name)
            written = {f"tensors/{name}": file for files in shards for name, file in files.items()}
            folder.commit(partial, final, step, state["run"], written)

    _on_all(mesh, prepare, partial)
    shards = mesh.gather(_on_all(mesh, write, partial))
    _on_all(mesh, finish, partial)
    if mesh.is_first:
        try:
            folder.prune(directory, config.checkpoint.keep, final)
        except OSError as error:
            logger.warning("older checkpoints in %s cannot be removed: %s", directory, error)
    return final


def load(
    origin: Origin, model: nn.Module, optimizer: torch.optim.Optimizer | None, base: str | None = None
) -> dict[str, Any]:
    """Fill model and optimizer from where the run starts, whatever layout wrote it; returns what `save` was given as
    `state`. Empty for a run that begins: then the optimizer is new, and the model gets weights or nothing.

    Without an `optimizer` it is the weights alone. `base` is the hash of the base of an adapter: the checkpoint must be
    of the same.
    """
    if origin.checkpoint is None:
        return {}
    named = tensors.model_tensors(model)
    if not origin.weights_only and optimizer is not None:
        named |= tensors.optimizer_tensors(model, optimizer)
    try:
        tensors.read(named, origin.checkpoint / "tensors")
        state = manifest.read_state(origin.checkpoint, manifest.read(origin.checkpoint))
    except (CheckpointException, SafetensorError, OSError, manifest.Damage) as error:
        raise UserError(f"checkpoint {origin.checkpoint} cannot be read: {_reason(error)}") from error
    if base is not None:
        check_base_identity(state.get("adapter", {}).get("base"), base, f"checkpoint {origin.checkpoint}")
    if origin.weights_only:
        if optimizer is not None:
            tensors.begin_average(optimizer)
        return {}
    return state


def _save_errors(work: Callable[[], T]) -> Callable[[], T]:
    """Whatever fails while saving is a SaveError: libraries raise what they like (tokenizers a bare Exception)."""

    def saving() -> T:
        try:
            return work()
        except (CheckpointException, Exception) as error:  # CheckpointException is a BaseException
            raise SaveError(_reason(error)) from error

    return saving


def _on_all(mesh: Mesh, work: Callable[[], T], partial: Path) -> T:
    """Do `work`; if any rank failed, clean up and raise on every rank, so that all of them take the same way on."""
    try:
        return agree(mesh, _save_errors(work), SaveError)
    except SaveError:
        if mesh.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _reason(error: BaseException) -> str:
    """One line: of a distributed failure, the first rank's own."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return " ".join(f"rank {rank}: {cause}".split())
    return " ".join(f"{type(error).__name__}: {error}".split())
