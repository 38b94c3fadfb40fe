"""The run folder and its files.

`metrics.jsonl` contains each optimizer step exactly once, however often the run was killed. Floats are stored exactly.
NaN and infinity are strings, so that any JSON parser can read the file, and null means "unknown". Only rank 0 writes.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnizoo.checkpoint.run_id import RUN_FILE

Metrics = Mapping[str, float | None]


class RunFolder:
    """Paths of the files in a run folder (`log.dir`).

    Files and folders are created by their first writer.

    Args:
        root: The run folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.identity = root / RUN_FILE
        self.metrics = root / "metrics.jsonl"
        self.bad_steps = root / "bad_steps.jsonl"
        self.bad_rows = root / "bad_rows.jsonl"
        self.starts = root / "starts.jsonl"
        self.samples = root / "samples.jsonl"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.report = root / "report.html"
        self.profile = root / "profile"
        self.wandb_id = root / "wandb_id"

    @property
    def questions(self) -> Path:
        """Folder for the media of the held-out prompts."""
        return self.root / "samples" / "questions"

    def items_of(self, step: int) -> Path:
        """Return the folder for media that the model generates at the evaluation after `step`."""
        return self.root / "samples" / f"step_{step:08d}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file. A line that is not an object is returned as `{"line": ...}`."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            row = line
        rows.append(row if isinstance(row, dict) else {"line": row})
    return rows


def replace_file(path: Path, text: str) -> None:
    """Replace the content of `path` atomically: readers get either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
