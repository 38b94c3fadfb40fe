"""Write the folder of precomputed items so that it survives a kill at any moment.

A shard contains the rows of a fixed range, in the order of the source, so its bytes do not depend on the number of
processes. It is written under another name and renamed when it is complete. The index is written last, from the files.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.sources.precomputed import (
    EMPTY,
    FORMAT,
    INDEX,
    PLAN,
    ROWS,
    VERSION,
    empty_name,
    shard_name,
)
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.precomputed import read_header

PARTIAL = ".partial-"  # in the names of files that are not complete; a process id follows
HASH_CHUNK = 16 << 20  # bytes


@dataclass(frozen=True)
class ShardFolder:
    """A folder of shards while it is written.

    Args:
        path: The folder.
        num_rows: Number of rows of the source.
        shard_rows: Number of rows per shard.
        stages: Names of the stages. The first one determines which rows are usable.
        text_stages: Names of the stages that also encode the empty prompt.
        plan: Everything that determines the content, for the index.
    """

    path: Path
    num_rows: int
    shard_rows: int
    stages: Sequence[str]
    text_stages: Sequence[str]
    plan: Mapping[str, Any]

    @property
    def num_shards(self) -> int:
        """The number of shards of each stage."""
        return -(-self.num_rows // self.shard_rows)

    def rows_of(self, shard: int) -> range:
        """Return the numbers of the rows in a shard."""
        start = shard * self.shard_rows
        return range(start, min(start + self.shard_rows, self.num_rows))

    def begin(self) -> None:
        """Create the folder, or check that it was begun with the same plan.

        Raises:
            UserError: If the folder has other content, or cannot be written.
        """
        fields = {"format": FORMAT, "version": VERSION, **self.plan}
        with _write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            plan_file = self.path / PLAN
            if plan_file.is_file():
                _check_same_plan(plan_file, fields)
                return
            others = [name for name in sorted(os.listdir(self.path)) if PARTIAL not in name and name != PLAN]
            if others:
                raise UserError(f"--out: {self.path} contains {others[0]}. Choose a new or empty folder.")
            _write_json(plan_file, fields)

    def is_done(self, stage: str, shard: int) -> bool:
        """Whether a shard is complete."""
        return (self.path / shard_name(stage, shard)).is_file()

    def write_shard(self, stage: str, shard: int, tensors: Inputs, lines: Sequence[Mapping[str, Any]] | None) -> None:
        """Write a shard.

        Args:
            stage: Name of the stage.
            shard: Number of the shard.
            tensors: The tensors, named `ROW/NAME`.
            lines: What `rows.jsonl` contains of these rows; None if another stage writes them.

        Raises:
            UserError: If the folder cannot be written.
        """
        with _write_errors(self.path):
            if lines is not None:  # before the shard, which marks both as complete
                text = "".join(json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n" for line in lines)
                _write_text(self.path / _rows_name(shard), text)
            _write_tensors(self.path / shard_name(stage, shard), tensors)

    def write_empty(self, stage: str, tensors: Inputs) -> None:
        """Write the tensors of a stage for the empty prompt. Does nothing if they exist."""
        file = self.path / empty_name(stage)
        if not file.is_file():
            with _write_errors(self.path):
                _write_tensors(file, {f"{EMPTY}/{name}": tensor for name, tensor in tensors.items()})

    def count_done(self) -> int:
        """Return the number of rows in complete shards, summed over stages."""
        done = 0
        for stage in self.stages:
            done += sum(len(self.rows_of(shard)) for shard in range(self.num_shards) if self.is_done(stage, shard))
        return done

    def finish(self) -> bool:
        """Write the index if all shards are complete, and return whether they are.

        Several processes may call this at the same time. They write the same bytes.
        """
        names = [empty_name(stage) for stage in self.text_stages]
        for stage in self.stages:
            names += [shard_name(stage, shard) for shard in range(self.num_shards)]
        if not all((self.path / name).is_file() for name in names):
            return False
        try:
            if not (self.path / INDEX).is_file():
                with _write_errors(self.path):
                    self._write_index(names)
            self._remove_parts()
        except FileNotFoundError:
            # Another process has written the index, and has removed the parts.
            assert (self.path / INDEX).is_file(), "a complete folder has all parts until its index is written"
        return True

    def _write_index(self, names: Sequence[str]) -> None:
        """Write the rows and the index. `names` are the files of all stages."""
        if not (self.path / ROWS).is_file():
            parts = [(self.path / _rows_name(shard)).read_text() for shard in range(self.num_shards)]
            _write_text(self.path / ROWS, "".join(parts))
        num_rows = (self.path / ROWS).read_bytes().count(b"\n")
        if not num_rows:
            raise UserError(f"--out: {self.path}: none of the {self.num_rows} rows is usable. Fix the rows.")
        files = {name: _describe_file(self.path / name) for name in sorted([*names, ROWS])}
        shapes = {stage: self._count_shapes(stage) for stage in self.stages}
        results = {"rows": num_rows, "bad_rows": self.num_rows - num_rows, "shapes": shapes, "files": files}
        _write_json(self.path / INDEX, {"format": FORMAT, "version": VERSION, **self.plan, **results})

    def _remove_parts(self) -> None:
        """Remove the rows of each shard, and files that a killed process has left behind."""
        parts = [self.path / _rows_name(shard) for shard in range(self.num_shards)]
        for file in [*parts, *self.path.glob(f"*{PARTIAL}*")]:
            file.unlink(missing_ok=True)

    def _count_shapes(self, stage: str) -> dict[str, dict[str, int]]:
        """Return how many rows have each shape, by name of the tensor."""
        counts: dict[str, Counter[str]] = {}
        for shard in range(self.num_shards):
            for name, shape in read_header(self.path / shard_name(stage, shard)).items():
                label = "x".join(map(str, shape)) or "scalar"
                counts.setdefault(name.partition("/")[2], Counter())[label] += 1
        return {name: dict(sorted(counter.items())) for name, counter in sorted(counts.items())}


def _rows_name(shard: int) -> str:
    """Return the name of the file with the rows of a shard, until all shards are complete."""
    return f"rows-{shard:05d}.jsonl"


def _check_same_plan(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise a `UserError` if a folder was begun with another plan."""
    try:
        stored = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"--out: {file}: not valid JSON: {first_line(error)}. Choose a new folder.") from None
    expected = json.loads(json.dumps(fields))
    different = [name for name in expected if stored.get(name) != expected[name]]
    if different:
        name = different[0]
        before = json.dumps(stored.get(name))[:200]
        now = json.dumps(expected[name])[:200]
        raise UserError(
            f"--out: {file.parent} was begun with other settings: {name} was {before}, and is now {now}. Choose a new "
            "folder, or restore the settings."
        )


def _describe_file(file: Path) -> dict[str, Any]:
    """Return the size and the hash of a file."""
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        while chunk := stream.read(HASH_CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "xxh3": digest.hexdigest()}


def _write_tensors(file: Path, tensors: Inputs) -> None:
    """Write a safetensors file, and rename it when it is complete."""
    with _renamed(file) as partial:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)


def _write_text(file: Path, text: str) -> None:
    """Write a text file, and rename it when it is complete."""
    with _renamed(file) as partial:
        partial.write_text(text)


def _write_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file, and rename it when it is complete."""
    _write_text(file, json.dumps(fields, indent=1, sort_keys=True) + "\n")


@contextmanager
def _renamed(file: Path) -> Iterator[Path]:
    """Context manager that yields a path to write to, and renames it to `file` after the data is on the disk."""
    partial = file.with_name(f"{file.name}{PARTIAL}{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Context manager that turns errors of the file system into one line."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(
            f"--out: {folder} cannot be written: {reason}. Run the same command again to continue after the last "
            "complete shard."
        ) from error


def tensors_of_row(row: int, tensors: Inputs) -> Inputs:
    """Return the tensors of a row with their names in a shard. They own their memory."""
    return {f"{row}/{name}": torch.clone(tensor) for name, tensor in tensors.items()}
