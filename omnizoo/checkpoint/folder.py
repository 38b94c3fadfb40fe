"""Checkpoints as folders: complete or not there. Written under a temporary name, committed by one atomic rename.

step_00000020/
  manifest.json    step, run, size and hash of every other file; a folder that does not match it is not a checkpoint
  state.json       step, tokens, data position of every lane
  config.yaml      the run's config
  model/           HF config, tokenizer, generation config: what an export needs besides weights
  tensors/         one safetensors file per rank
best.json          which of the checkpoints beside it is the best one, by which metric (`checkpoint.best`)
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omnizoo.checkpoint import manifest as manifests
from omnizoo.checkpoint.manifest import Damage, File, Manifest
from omnizoo.parallel.mesh import Mesh

logger = logging.getLogger(__name__)

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """Which checkpoint of a run had the best `metric`."""

    run: str
    metric: str
    value: float
    step: int


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def partial_of(directory: Path, step: int) -> Path:
    return directory / f".step_{step:08d}.partial"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name says; None if the folder is not called like one."""
    found = re.fullmatch(r"step_(\d{8,})", folder.name)
    return int(found[1]) if found else None


def checkpoints(directory: Path) -> list[Path]:
    """Folders that are called like checkpoints, the newest first; whether they are intact is another question."""
    steps = {path: step for path in directory.glob("step_*") if (step := step_of(path)) is not None and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def damage(folder: Path, mesh: Mesh | None = None) -> str | None:
    """Why `folder` cannot be trusted as a checkpoint, or None: every byte is as it was written.

    With a mesh, each rank reads its part of the files, and all ranks get the same answer.
    """
    rank, world = (mesh.rank, mesh.layout.world) if mesh else (0, 1)
    found: tuple[Manifest | None, str | None] = (None, None)
    if rank == 0:
        found = _look(folder)
    manifest, reason = mesh.from_first(found) if mesh else found
    if manifest is None:
        return str(reason)
    try:
        # By turns in the order of names: on the layout that wrote it, a rank reads the shards it is about to load.
        manifests.check_hashes(folder, manifest, sorted(manifest.files)[rank::world])
    except Damage as error:
        reason = str(error)
    if mesh:
        reason = mesh.from_first(next(filter(None, mesh.gather(reason)), None))
    return reason


def _look(folder: Path) -> tuple[Manifest | None, str | None]:
    try:
        manifest = manifests.read(folder)
        manifests.check_outside(folder, manifest)
        manifests.read_state(folder, manifest)
    except Damage as error:
        return None, str(error)
    return manifest, None


def newest_intact(directory: Path, mesh: Mesh | None = None) -> tuple[Path | None, dict[Path, str]]:
    """The newest intact checkpoint, and why those after it were passed over. The same on all ranks."""
    passed: dict[Path, str] = {}
    found = checkpoints(directory) if mesh is None or mesh.is_first else []
    for folder in mesh.from_first(found) if mesh else found:
        reason = damage(folder, mesh)
        if reason is None:
            return folder, passed
        passed[folder] = reason
        logger.warning("checkpoint %s is damaged or incomplete: %s; trying the one before", folder, reason)
    return None, passed


def owner(folder: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None if its manifest cannot tell."""
    try:
        return manifests.read(folder).run
    except Damage:
        return None


def commit(partial: Path, final: Path, step: int, run: str, written: Mapping[str, File]) -> None:
    """Write the manifest, flush everything to the disk, and rename: from here on the checkpoint exists.

    `written` are the files of all ranks, whose hashes are known since they were written, and which each has brought to
    the disk; the others, all small, are read. A file of another node is asked for by its name: a listing of its folder
    may be older than the file on a network's file system.
    """
    for name in written:
        if not (partial / name).is_file():
            raise FileNotFoundError(f"{name}, written by another rank, is not there: do all nodes share this folder?")
    found = {file.relative_to(partial).as_posix(): file for file in sorted(partial.rglob("*")) if file.is_file()}
    own = {name: file for name, file in found.items() if name not in written}
    hashes = {**written, **{name: manifests.hash_file(file) for name, file in own.items()}}
    (partial / manifests.NAME).write_text(Manifest(run, step, dict(sorted(hashes.items()))).text())
    folders = [path for path in partial.rglob("*") if path.is_dir()]
    for path in [*own.values(), partial / manifests.NAME, *folders, partial]:
        flush(path)
    if final.exists():  # a damaged one, or a rerun after a resume from an earlier step
        _discard(final)
    os.rename(partial, final)
    flush(final.parent)


def prune(directory: Path, keep: int, newest: Path) -> None:
    """Keep `newest`, just written, the `keep - 1` before it, and the best one; remove older ones of the same run, and
    leftovers.
    """
    run, own = owner(newest), checkpoints(directory)
    before = [folder for folder in own[own.index(newest) + 1 :] if owner(folder) == run]
    best = read_best(directory)
    for folder in before[keep - 1 :]:
        if best is None or best.run != run or best.step != step_of(folder):
            _discard(folder)
    clean(directory)


def write_best(directory: Path, best: Best) -> None:
    """As a whole: a reader sees the old one or the new one."""
    if best == read_best(directory):
        return
    partial = directory / f".{BEST}.partial"
    write_json(partial, asdict(best))
    flush(partial)
    os.replace(partial, directory / BEST)


def read_best(directory: Path) -> Best | None:
    """None: there is none, or it cannot be read, which is said."""
    try:
        fields = json.loads((directory / BEST).read_bytes())
        best = Best(str(fields["run"]), str(fields["metric"]), float(fields["value"]), fields["step"])
        if type(best.step) is not int:
            raise TypeError(f"step is {best.step!r:.40}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", directory / BEST, " ".join(f"{type(error).__name__}: {error}".split()))
        return None
    return best


def clean(directory: Path) -> None:
    """Remove what saves that never finished have left. Only what bears our own name for it."""
    for leftover in directory.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)  # it is in nobody's way


def _discard(folder: Path) -> None:
    """Under the name of a leftover first: killed half-way, nobody takes what remains for a checkpoint."""
    leftover = folder.with_name(f".{folder.name}.old.partial")
    shutil.rmtree(leftover, ignore_errors=True)
    os.rename(folder, leftover)
    shutil.rmtree(leftover)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
