"""Log-probabilities of answers by a reference, kept on disk: a run on answers that are known needs no reference.

A folder for each reference (and precision) has Arrow streams of (key, log-probability). Every rank that computes some
adds a file of its own, so that no two write to one; all ranks read all files. A key is a hash of all that the value
depends on: tokens, targets and media. What was changed is not found, and computed again.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from omnizoo.config.errors import UserError

SCHEMA = pa.schema([("key", pa.string()), ("log_probability", pa.float64())])
SUFFIX = ".arrows"


class ReferenceCache:
    """`identity` is a hash of the reference; `writes`: what is added goes to disk, and not to memory only."""

    def __init__(self, folder: str, identity: str, writes: bool, key: str) -> None:
        self.folder, self.writes, self.key = Path(folder) / identity, writes, f"{key}: {folder}"
        self.writer: Any = None
        self.values: dict[str, float] = {"": 0.0}  # of what is no answer
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.folder.glob(f"*{SUFFIX}")):
                self.values |= read_file(file)
        except OSError as error:
            raise UserError(f"{self.key}: {error.strerror or error}") from None

    def misses(self, keys: Sequence[str]) -> int:
        return sum(key not in self.values for key in keys)

    def find(self, keys: Sequence[str]) -> list[float]:
        return [self.values[key] for key in keys]

    def add(self, keys: Sequence[str], values: Sequence[float]) -> None:
        each = zip(keys, values, strict=True)
        new = {key: value for key, value in each if key not in self.values and math.isfinite(value)}
        self.values |= new
        if not new or not self.writes:
            return
        try:
            if self.writer is None:
                self.file = (self.folder / f"{uuid4().hex}{SUFFIX}").open("xb")
                self.writer = pa.ipc.new_stream(self.file, SCHEMA)
            self.writer.write_batch(pa.record_batch([list(new), list(new.values())], schema=SCHEMA))
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.key}: cannot be written to: {error.strerror or error}") from None


def read_file(file: Path) -> dict[str, float]:
    """What a file holds, up to where a run that was killed has left it."""
    found: dict[str, float] = {}
    with file.open("rb") as stream:
        try:
            for batch in pa.ipc.open_stream(stream):
                found |= zip(*(column.to_pylist() for column in batch.columns), strict=True)
        except (pa.ArrowInvalid, OSError):  # cut off in the middle of a batch, or of its beginning
            pass
    return found
