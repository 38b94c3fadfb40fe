"""Checkpoint folders. Saving is atomic: files are written to a temporary folder, and the folder is renamed at the end.

step_00000020/
  manifest.json    step, run, size and hash of every other file; a folder that does not match it is not a checkpoint
  state.json       step, tokens, data position of every lane
  config.yaml      the run's config
  model/           HF config, tokenizer, generation config: the files that an export needs in addition to weights
  tensors/         one safetensors file per rank
best.json          step and metric of the best checkpoint in the same folder (`checkpoint.best`)
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnizoo.checkpoint import manifest as manifests
from omnizoo.checkpoint.manifest import Damage, File, Manifest
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


def folder_of(directory: Path, step: int) -> Path:
    """Return the checkpoint folder for `step`."""
    return directory / f"step_{step:08d}"


def partial_of(directory: Path, step: int) -> Path:
    """Return the temporary folder in which the checkpoint for `step` is written."""
    return directory / f".step_{step:08d}.partial"


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder; None if the folder has another kind of name."""
    match = re.fullmatch(r"step_(\d{8,})", folder.name)
    return int(match[1]) if match else None


def checkpoints(directory: Path) -> list[Path]:
    """Return the folders that are named like checkpoints, newest first. They are not checked for damage."""
    steps = {}
    for path in directory.glob("step_*"):
        step = step_of(path)
        if step is not None and path.is_dir():
            steps[path] = step
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def damage(folder: Path, mesh: Mesh | None = None) -> str | None:
    """Return why a checkpoint is damaged or incomplete; None if every byte of it is intact.

    With a mesh, each rank reads some of the files, and all ranks return the same result. Collective if `mesh` is
    given: all ranks must call it.
    """
    rank = mesh.rank if mesh else 0
    world_size = mesh.layout.world if mesh else 1
    manifest_or_reason: tuple[Manifest | None, str | None] = (None, None)
    if rank == 0:
        manifest_or_reason = _read_manifest(folder)
    manifest, reason = mesh.from_first(manifest_or_reason) if mesh else manifest_or_reason
    if manifest is None:
        return str(reason)
    try:
        # Files are assigned in the order of their names, so that a rank on the same layout reads the shards that it
        # is about to load.
        manifests.check_hashes(folder, manifest, sorted(manifest.files)[rank::world_size])
    except Damage as error:
        reason = str(error)
    if mesh:
        reasons = mesh.gather(reason)
        reason = mesh.from_first(next(filter(None, reasons), None))
    return reason


def _read_manifest(folder: Path) -> tuple[Manifest | None, str | None]:
    """Return the manifest and None, or None and the reason why the checkpoint is damaged. Hashes are not checked."""
    try:
        manifest = manifests.read(folder)
        manifests.check_outside(folder, manifest)
        manifests.read_state(folder, manifest)
    except Damage as error:
        return None, str(error)
    return manifest, None


def newest_intact(directory: Path, mesh: Mesh | None = None) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest intact checkpoint, and the reasons why newer ones are damaged.

    With a mesh, the result is the same on all ranks. Collective if `mesh` is given: all ranks must call it.
    """
    folders = checkpoints(directory) if mesh is None or mesh.is_first else []
    if mesh:
        folders = mesh.from_first(folders)

    damaged: dict[Path, str] = {}
    for folder in folders:
        reason = damage(folder, mesh)
        if reason is None:
            return folder, damaged
        damaged[folder] = reason
        logger.warning("checkpoint %s is damaged or incomplete: %s. Trying the previous checkpoint.", folder, reason)
    return None, damaged


def owner(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if its manifest is damaged."""
    try:
        return manifests.read(folder).run
    except Damage:
        return None


def commit(partial: Path, final: Path, step: int, run: str, written: Mapping[str, File]) -> None:
    """Write the manifest, flush everything to disk, and rename `partial` to `final`.

    Files of other nodes are looked up by name, because on a network file system the listing of a folder may not contain
    its newest files yet.

    Args:
        partial: The temporary folder with all files.
        final: The folder of the checkpoint.
        step: Number of completed steps.
        run: Id of the run.
        written: Sizes and hashes of the tensor files of all ranks. The ranks have already flushed these files. The
            other files are small and are read here.

    Raises:
        FileNotFoundError: If a file of another rank is not visible on this node.
    """
    for name in written:
        if not (partial / name).is_file():
            raise FileNotFoundError(
                f"{name}: another rank has written this file, but it does not exist on this node. Use a checkpoint.dir "
                "that all nodes share."
            )

    hashes = dict(written)
    small_files = []
    for file in sorted(partial.rglob("*")):
        name = file.relative_to(partial).as_posix()
        if file.is_file() and name not in written:
            small_files.append(file)
            hashes[name] = manifests.hash_file(file)
    manifest = Manifest(run, step, dict(sorted(hashes.items())))
    (partial / manifests.NAME).write_text(manifest.text())

    folders = [path for path in partial.rglob("*") if path.is_dir()]
    for path in [*small_files, partial / manifests.NAME, *folders, partial]:
        flush(path)
    if final.exists():  # damaged, or written before the run resumed from an earlier step
        discard(final)
    os.rename(partial, final)
    flush(final.parent)


def discard(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves no incomplete checkpoint."""
    leftover = folder.with_name(f".{folder.name}.old.partial")
    shutil.rmtree(leftover, ignore_errors=True)
    os.rename(folder, leftover)
    shutil.rmtree(leftover)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1))


def flush(path: Path) -> None:
    """Call fsync on a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
