"""Disk cache for log-probabilities of responses under the reference. If all are cached, no reference is built.

There is one folder per reference and precision, with Arrow streams of (key, log-probability). Each rank that
computes values writes a separate file, and all ranks read all files. A key is a hash of everything that the value
depends on: tokens, targets and media. A changed response has a different key and is computed again.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config

SCHEMA = pa.schema([("key", pa.string()), ("log_probability", pa.float64())])
SUFFIX = ".arrows"


class ReferenceCache:
    """Log-probabilities in memory and on disk, keyed by response.

    Args:
        folder: The folder of all caches.
        identity: Name of the subfolder, from `cache_name`.
        writes: Whether this rank writes new values to disk. Otherwise it keeps them in memory only.
        key: Config key of the folder, for messages.
    """

    def __init__(self, folder: str, identity: str, writes: bool, key: str) -> None:
        self.folder = Path(folder) / identity
        self.writes = writes
        self.key = f"{key}: {folder}"
        self.writer: Any = None
        self.values: dict[str, float] = {"": 0.0}  # an empty key marks samples that are not responses
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.folder.glob(f"*{SUFFIX}")):
                self.values |= read_file(file)
        except OSError as error:
            raise UserError(
                f"{self.key}: cannot be read: {error.strerror or error}. Choose a folder that can be read and written."
            ) from None

    def add(self, keys: Sequence[str], values: Sequence[float]) -> None:
        """Add the finite values of new keys. Ranks with `writes` also write them to disk."""
        new = {}
        for key, value in zip(keys, values, strict=True):
            if key not in self.values and math.isfinite(value):
                new[key] = value
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
            raise UserError(
                f"{self.key}: cannot be written: {error.strerror or error}. Free some space or choose another folder."
            ) from None


def cache_name(identity: str, config: Config, is_base: bool) -> str:
    """Return the name of the subfolder for a reference.

    Args:
        identity: Hash of the reference.
        config: The config of the run.
        is_base: Whether the reference is the base model of the adapter.
    """
    name = f"{identity}-{config.train.precision}"
    # A quantized base has different log-probabilities, so its cache is separate.
    if is_base and config.model.adapter and config.model.adapter.base:
        name += f"-{config.model.adapter.base}"
    return name


def read_file(file: Path) -> dict[str, float]:
    """Return the values in a file. Its end may be missing if the run that wrote it was killed."""
    values: dict[str, float] = {}
    with file.open("rb") as stream:
        try:
            for batch in pa.ipc.open_stream(stream):
                keys, scores = (column.to_pylist() for column in batch.columns)
                values |= zip(keys, scores, strict=True)
        except (pa.ArrowInvalid, OSError):  # the last batch or the header is incomplete
            pass
    return values
