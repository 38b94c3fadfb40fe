"""The run folder and its files.

`metrics.jsonl` contains each optimizer step exactly once, even if the run was killed and resumed. Floats are stored
exactly. NaN and infinity are strings, so any JSON parser can read the file. A null means that the value is unknown.
Only rank 0 writes to the folder.
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

    Creating the object creates no files. The code that first writes to a file or folder creates it.

    Args:
        root: The run folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.identity = root / RUN_FILE  # id of the run
        self.metrics = root / "metrics.jsonl"  # one object per step
        self.bad_steps = root / "bad_steps.jsonl"  # one object per skipped step
        self.bad_rows = root / "bad_rows.jsonl"  # one object per skipped row
        self.starts = root / "starts.jsonl"  # one object per launch
        self.samples = root / "samples.jsonl"  # one object per response to a held-out prompt
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.exports = root / "exports"  # Hugging Face folders (`checkpoint.export`)
        self.report = root / "report.html"
        self.profile = root / "profile"  # folder for profiler traces
        self.wandb_id = root / "wandb_id"  # id of the run at Weights & Biases

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
    """Replace the content of a file atomically, so readers get either the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
