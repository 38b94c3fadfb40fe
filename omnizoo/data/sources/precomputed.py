"""Read the folder that `omnizoo data precompute` wrote: an index, rows, and safetensors shards.

index.json                  fingerprints, rules, normalization, shapes, and the size and hash of each file
rows.jsonl                  one line per row: its fields, and the sizes of its items
latents-00000.safetensors   tensors of rows 0 to 63, named ROW/NAME; one file per stage and shard
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.row import Row
from omnizoo.data.sources.base import MediaFolder, RowFiles
from omnizoo.data.sources.jsonl import JsonlFile
from omnizoo.modalities.item import MediaSize, Port
from omnizoo.modalities.precomputed import PrecomputedItem, StoredTargets, StoredTensors

INDEX = "index.json"
PLAN = "plan.json"  # written before the first shard; the same fields as the index, without results
ROWS = "rows.jsonl"
FORMAT = "omnizoo-precomputed"
VERSION = 1
DIFFUSION, CODES = "diffusion", "codes"  # kinds of folders
EMPTY = "empty"  # key of the empty prompt in the shard `empty-STAGE.safetensors`
LATENTS = "latents"


def shard_name(stage: str, shard: int) -> str:
    """Return the file name of a shard."""
    return f"{stage}-{shard:05d}.safetensors"


def empty_name(stage: str) -> str:
    """Return the name of the file with the tensors of a stage for the empty prompt."""
    return f"empty-{stage}.safetensors"


@dataclass(frozen=True)
class PrecomputedIndex:
    """The content of an index."""

    folder: Path
    kind: str  # `DIFFUSION` or `CODES`
    num_rows: int
    shard_rows: int  # number of rows of the original source per shard
    stages: tuple[str, ...]
    fingerprints: Mapping[str, str]  # hash of each frozen component, by name
    rules: Mapping[str, Any]  # settings that change what is stored
    normalization: Mapping[str, Any] | None  # of latents
    media_folder: str | None  # folder of media files that were not encoded
    files: Mapping[str, Mapping[str, Any]]  # size and hash of each file

    @property
    def file(self) -> Path:
        """The path of the index."""
        return self.folder / INDEX

    @classmethod
    def read(cls, folder: Path) -> "PrecomputedIndex":
        """Read the index of a folder, and check that its files are complete.

        Raises:
            UserError: If the index is damaged or of another version, or a file is missing or truncated.
        """
        file = folder / INDEX
        if not file.is_file():
            raise UserError(f"{folder}: omnizoo data precompute has not finished. Run the same command again.")
        try:
            fields = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file}: cannot be read: {first_line(error)}. Run omnizoo data precompute again."
            ) from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT or fields.get("version") != VERSION:
            raise UserError(f"{file}: expected format {FORMAT}, version {VERSION}. Run omnizoo data precompute again.")
        index = cls(
            folder=folder,
            kind=fields["kind"],
            num_rows=fields["rows"],
            shard_rows=fields["shard_rows"],
            stages=tuple(fields["stages"]),
            fingerprints=fields["fingerprints"],
            rules=fields["rules"],
            normalization=fields["normalization"],
            media_folder=fields["media_folder"],
            files=fields["files"],
        )
        for name, entry in index.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                state = "is missing" if size is None else f"has {size:,} bytes instead of {entry['bytes']:,}"
                raise UserError(f"{path}: the file {state}. Run omnizoo data precompute again.")
        return index


class PrecomputedRows(JsonlFile):
    """The rows of a precomputed folder. Their items have the stored tensors as values.

    Args:
        folder: The folder.
        media_outside: Whether media that were not encoded may be outside the folder of the original source.
        open_file: Returns an open file for a path.
        media_folder: Folder of media that were not encoded; None for that of the original source.
    """

    stored_kind = "PrecomputedRows"

    def __init__(
        self, folder: Path, media_outside: bool, open_file: Any, media_folder: MediaFolder | None = None
    ) -> None:
        self.content = PrecomputedIndex.read(folder)
        if media_folder is None:
            base = Path(self.content.media_folder) if self.content.media_folder else folder
            media_folder = MediaFolder(base, None if media_outside else base.resolve())
        super().__init__(folder / ROWS, media_folder, open_file)
        if len(self) != self.content.num_rows:
            raise UserError(
                f"{self.path}: the file has {len(self)} rows, but {INDEX} lists {self.content.num_rows}. Run omnizoo "
                "data precompute again."
            )

    def read(self, row: int) -> Row:
        """Return the fields of a row. For a diffusion transformer, `latents` are its stored tensors."""
        stored = super().read(row)
        fields: Row = stored["fields"]
        if self.content.kind == DIFFUSION:
            number = stored["row"]
            latents, *conditions = self.content.stages
            fields[LATENTS] = PrecomputedItem(
                tensors=self._tensors(latents, number),
                conditions=tuple(self._tensors(stage, number) for stage in conditions),
                empty_conditions=tuple(self._empty(stage, number) for stage in conditions),
            )
        return fields

    def files(self, row: int) -> RowFiles:
        """Return the files of a row, and the stored targets of its items."""
        stored = super().read(row)
        [stage, *_] = self.content.stages
        targets = {}
        for index, item in stored.get("items", {}).items():
            tensors = self._tensors(stage, f"{stored['row']}/{index}", stored["row"])
            targets[int(index)] = StoredTargets(tensors, Port(*item["port"]), MediaSize(**item["size"]))
        return RowFiles(self, row, targets)

    def _tensors(self, stage: str, key: int | str, number: int | None = None) -> StoredTensors:
        """Return the tensors of a stage.

        Args:
            stage: Name of the stage.
            key: The number of the row in the original source, and of the item if a row has several.
            number: The number of the row, if it is not the key.
        """
        shard = shard_name(stage, int(key if number is None else number) // self.content.shard_rows)
        return StoredTensors(self.content.folder / shard, str(key))

    def _empty(self, stage: str, number: int) -> StoredTensors:
        """Return the tensors of a stage for the empty prompt, or those of the row if they do not depend on it."""
        if empty_name(stage) not in self.content.files:
            return self._tensors(stage, number)
        return StoredTensors(self.content.folder / empty_name(stage), EMPTY)


def is_precomputed(folder: Path) -> bool:
    """Whether a folder is the result of `omnizoo data precompute`, finished or not."""
    return (folder / INDEX).is_file() or (folder / PLAN).is_file()


def check_fingerprints(indexes: Sequence[PrecomputedIndex], expected: Mapping[str, str], key: str) -> None:
    """Check that rows were precomputed with the frozen components of the model.

    Args:
        indexes: The indexes of the sources.
        expected: Hash of each frozen component of the model, by name.
        key: Config key of the model, for messages.

    Raises:
        UserError: If a component differs.
    """
    for index in indexes:
        for name, stored in index.fingerprints.items():
            if expected.get(name, stored) != stored:
                raise UserError(
                    f"{index.folder}: the rows were precomputed with another `{name}` ({stored[:12]}) than that of "
                    f"{key} ({expected[name][:12]}). Run omnizoo data precompute with this model."
                )
