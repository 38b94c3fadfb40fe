"""Checks that run before training starts.

They find mistakes in seconds, before weights are loaded: first the run folder, then plugins, then the model without
weights, then the data. Every check raises the same `UserError` on all ranks, so that no rank waits for a failed one.
"""

import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import nn

from omnizoo.checkpoint.folder import checkpoints
from omnizoo.checkpoint.lock import hold
from omnizoo.checkpoint.retention import clean
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import PythonObject
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.loading.reader import Reader
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.user_module import given_model, tensors_of
from omnizoo.parallel.errors import first_different_rank, sync_errors
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.memory import check_memory, saved_bytes
from omnizoo.reporting.run_folder import RunFolder
from omnizoo.training.causality_probe import ProbeResult, dropout_of_media, probe
from omnizoo.training.evaluation.pipeline_samples import check_denoiser_settings
from omnizoo.training.evaluation.responses import check_samples
from omnizoo.training.losses.base import losses_of_rows
from omnizoo.training.optimizers.build import check_optimizer
from omnizoo.training.optimizers.schedule import learning_rate
from omnizoo.training.precompute.check import check_precomputed

log = logging.getLogger(__name__)

GB = 1e9


def lock_folders(folder: RunFolder, checkpoint_dir: Path, mesh: Mesh, resources: ExitStack) -> None:
    """Lock the run folder and the checkpoint folder, and check that both are writable.

    Args:
        folder: The run folder (`log.dir`).
        checkpoint_dir: The checkpoint folder. It may be the run folder or lie inside it.
        mesh: The mesh of the run. Only rank 0 acquires the locks.
        resources: Exit stack that releases the locks when it is closed.

    Raises:
        UserError: If another run uses one of the folders, or one of them cannot be written.
    """

    def lock() -> None:
        resources.enter_context(hold(folder.root, "log.dir"))
        if checkpoint_dir.resolve() != folder.root.resolve():
            resources.enter_context(hold(checkpoint_dir, "checkpoint.dir"))
        clean(checkpoint_dir)

    sync_errors(mesh, lambda: lock() if mesh.is_first else None)


def check_plugins(config: Config, reads_rows: bool = True) -> None:
    """Import the optimizer, the schedule and the losses that the config names, and call the schedule once.

    Args:
        config: The config of the run.
        reads_rows: Whether the run reads rows. The RL engine receives rollouts instead, and builds its losses itself.

    Raises:
        UserError: If a plugin cannot be imported, or does not accept its options.
    """
    check_optimizer(config)
    learning_rate(config.train, 1)
    if reads_rows:
        losses_of_rows(config)


def check_model(model: nn.Module, config: Config, mesh: Mesh, checkpoint_dir: Path) -> None:
    """Check a model that has no weights yet.

    Args:
        model: The model, on the meta device.
        config: The config of the run.
        mesh: The mesh that the model will be distributed over.
        checkpoint_dir: The checkpoint folder. Its disk must have enough free space.

    Raises:
        UserError: If ranks have different models, if the model is not causal or mixes packed samples, or if there is
            too little memory or disk space.
    """
    check_same_model(config, mesh)
    needs_probe = mesh.is_first and denoiser_recipe(model) is None  # a diffusion transformer is not causal
    probe_result = sync_errors(mesh, lambda: probe(config.model) if needs_probe else None)
    if probe_result is not None:
        warn_about_probe(probe_result, model, mesh.layout, config.train.micro_batch)
    sync_errors(mesh, lambda: check_memory(model, mesh, config))
    sync_errors(mesh, lambda: check_denoiser_settings(model, config))
    sync_errors(mesh, lambda: check_samples(model, mesh, config))
    sync_errors(mesh, lambda: check_disk_space(model, config, checkpoint_dir) if mesh.is_first else None)


def check_same_model(config: Config, mesh: Mesh) -> None:
    """Check that a model passed from Python has the same parameters on all ranks. The parameter values may differ.

    Raises:
        UserError: If names, shapes, dtypes or `requires_grad` differ, or if the model of rank 0 has no weights.
    """
    if not isinstance(config.model.given, PythonObject):
        return
    tensors = list(tensors_of(given_model(config.model)))
    signature = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
    rank = first_different_rank(mesh, signature)
    if rank is not None:
        raise UserError(
            f"model=: rank {rank} has a model with different parameters than rank 0. Build the same model on all ranks."
        )
    on_meta = mesh.from_first([name for name, tensor in tensors if tensor.is_meta])
    if on_meta:
        raise UserError(
            f"model=: {on_meta[0]} is on the meta device on rank 0, but training starts from the weights of rank 0. "
            "Initialize the model on rank 0."
        )


def check_rows(readers: Sequence[Reader | None], model: nn.Module, mesh: Mesh) -> None:
    """Check precomputed rows, and that rows passed from Python are the same on all ranks.

    Raises:
        UserError: If a rank has different rows than rank 0, or rows were precomputed with another model.
    """
    for reader in readers:
        if reader is not None:
            check = partial(check_precomputed, reader, reader.config, model)
            sync_errors(mesh, check if mesh.is_first else lambda: None)
    if mesh.layout.world == 1:
        return
    for reader in readers:
        if reader is None:
            continue
        for source_config, source in zip(reader.config.data.sources, reader.sources, strict=True):
            if source_config.path is not None:
                continue
            rank = first_different_rank(mesh, content_of(source))
            if rank is not None:
                raise UserError(
                    f"{source_config.name}: rank {rank} has different rows than rank 0. "
                    "Create the same rows, in the same order, on every rank."
                )


def warn_about_probe(result: ProbeResult, model: nn.Module, layout: Layout, micro_batch: int) -> None:
    """Warn if the probe could not check the model, or if its losses will depend on the layout."""
    if result.unchecked:
        log.warning(
            "model.module: could not check that the model is causal and keeps packed samples apart: %s",
            result.unchecked,
        )
    random_settings = [*result.random, *dropout_of_media(model)]
    if not random_settings:
        return
    if layout.sp > 1:
        reason = "packs are split across ranks"
    elif micro_batch > 1:
        reason = f"train.micro_batch is {micro_batch}"
    else:
        return
    log.warning(
        "The model uses random numbers in training (%s) and %s. Losses of different layouts will match only "
        "statistically. Set these options to 0 for losses that do not depend on the layout.",
        ", ".join(random_settings),
        reason,
    )


def check_disk_space(model: nn.Module, config: Config, checkpoint_dir: Path) -> None:
    """Check that one checkpoint fits on the disk. Warn if the disk is too small for all checkpoints that will be kept.

    Raises:
        UserError: If not even one checkpoint fits.
    """
    num_kept = config.checkpoint.keep
    num_saves = 1
    if config.checkpoint.every:
        num_saves = -(-config.train.steps // config.checkpoint.every)  # rounded up
    if config.checkpoint.best is not None:
        num_saves += config.train.steps // max(1, config.evaluation.every)
        num_kept += 1

    needed = saved_bytes(model, config)
    free = shutil.disk_usage(_nearest_existing(checkpoint_dir)).free
    if free < needed:
        raise UserError(
            f"checkpoint.dir: {checkpoint_dir} has {free / GB:.2f} GB free, but one checkpoint of this run needs about "
            f"{needed / GB:.2f} GB (weights and optimizer state). Free some space or choose another folder."
        )
    # While a checkpoint is written, older checkpoints are still on the disk.
    num_existing = min(len(checkpoints(checkpoint_dir)), num_kept)
    num_to_come = min(num_saves, num_kept + 1 - num_existing)
    if free < num_to_come * needed:
        log.warning(
            "checkpoint.dir: %s has %.2f GB free, but the next %d checkpoints need about %.2f GB. "
            "Free some space or lower checkpoint.keep (now %d).",
            checkpoint_dir,
            free / GB,
            num_to_come,
            num_to_come * needed / GB,
            config.checkpoint.keep,
        )


def _nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, otherwise its nearest existing parent."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
