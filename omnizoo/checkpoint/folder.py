"""Checkpoints as folders: complete or not there. Written under a temporary name, committed by one atomic rename.

step_00000020/
  manifest.json    step, and the size of every other file; a folder without a matching manifest is not a checkpoint
  state.json       step, tokens, data position of every lane
  config.yaml      the run's config
  model/           HF config, tokenizer, generation config: what an export needs besides weights
  tensors/         one safetensors file per rank
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def partial_of(directory: Path, step: int) -> Path:
    return directory / f".step_{step:08d}.partial"


def is_complete(folder: Path) -> bool:
    return incompleteness(folder) is None


def incompleteness(folder: Path) -> str | None:
    """Why `folder` cannot be trusted as a checkpoint, or None if it can."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def newest_complete(directory: Path) -> Path | None:
    """The newest complete checkpoint; half-written ones are passed over with a warning."""
    for folder in sorted(directory.glob("step_*"), reverse=True):
        reason = incompleteness(folder)
        if reason is None:
            return folder
        logger.warning("checkpoint %s is incomplete: %s; trying the one before", folder, reason)
    return None


def commit(partial: Path, final: Path, step: int) -> None:
    """Write the manifest, flush everything to the disk, and rename: from here on the checkpoint exists."""
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in files}
    write_json(partial / MANIFEST, {"step": step, "files": sizes})
    for file in [*files, partial / MANIFEST, partial]:
        _flush(file)
    if final.exists():  # an incomplete one of the same step, or a rerun after a resume from an earlier step
        shutil.rmtree(final)
    os.rename(partial, final)
    _flush(final.parent)


def prune(directory: Path, keep: int) -> None:
    """Keep the newest `keep` complete checkpoints; remove older ones and leftovers of saves that never finished."""
    complete = [folder for folder in sorted(directory.glob("step_*"), reverse=True) if is_complete(folder)]
    for folder in [*complete[keep:], *directory.glob(".step_*.partial")]:
        shutil.rmtree(folder)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
