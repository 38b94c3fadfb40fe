"""Saving and loading the whole state of a run, under any layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from omnizoo.checkpoint import folder, tensors
from omnizoo.config.errors import UserError
from omnizoo.config.load import save_config
from omnizoo.config.schema import Config
from omnizoo.models.omni import save_model_config
from omnizoo.parallel.mesh import Mesh


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
    """Write checkpoint `step` from all ranks, rank 0's `state` (JSON-able) with it. SaveError on all ranks or none."""
    partial, final = folder.partial_of(directory, step), folder.folder_of(directory, step)
    error: BaseException | None = None
    if mesh.is_first:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / "model").mkdir(parents=True)
        except OSError as caught:
            error = caught
    _all_well(error, mesh, partial)
    try:
        tensors.write(tensors.model_tensors(model) | tensors.optimizer_tensors(model, optimizer), partial / "tensors")
    except (CheckpointException, OSError, RuntimeError) as caught:  # CheckpointException is a BaseException
        error = caught
    _all_well(error, mesh, partial)
    if mesh.is_first:
        try:
            folder.write_json(partial / "state.json", {"step": step, **state})
            save_config(config, partial / "config.yaml")
            if isinstance(model, PreTrainedModel):
                save_model_config(model, partial / "model")
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(partial / "model")
            tokenizer.save_pretrained(partial / "model")
            folder.commit(partial, final, step)
            folder.prune(directory, config.checkpoint.keep)
        except OSError as caught:
            error = caught
    _all_well(error, mesh, partial)
    return final


def find(config: Config, directory: Path) -> Path | None:
    """The checkpoint to resume from, as `checkpoint.resume` says; None to start afresh."""
    wanted = config.checkpoint.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        return folder.newest_complete(directory)
    reason = folder.incompleteness(Path(wanted))
    if reason is not None:
        raise UserError(f"checkpoint.resume: {wanted} is not a complete checkpoint: {reason}")
    return Path(wanted)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimizer from `path`, whatever layout wrote it; returns what `save` was given as `state`."""
    tensors.read(tensors.model_tensors(model) | tensors.optimizer_tensors(model, optimizer), path / "tensors")
    state = json.loads((path / "state.json").read_text())
    assert isinstance(state, dict)
    return state


def _all_well(error: BaseException | None, mesh: Mesh, partial: Path) -> None:
    """If any rank failed, clean up and raise on every rank, so that all of them take the same way on."""
    (failed,) = mesh.sum([float(error is not None)])
    if not failed:
        return
    reasons = [reason for reason in mesh.gather(_reason(error) if error else None) if reason]
    if mesh.is_first:
        shutil.rmtree(partial, ignore_errors=True)
    raise SaveError(mesh.from_first(reasons[0] if reasons else None)) from error


def _reason(error: BaseException) -> str:
    """One line: of a distributed failure, the first rank's own."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return f"{type(error).__name__}: {error}"
