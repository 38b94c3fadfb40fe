"""Rows of a `datasets.Dataset`: a saved folder, any file that `datasets` can load, or a dataset object."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.row import STRUCTS, BadRow, Row, check_characters, without_nulls
from omnizoo.data.sources.base import FolderRows, MediaFolder, RowSource
from omnizoo.data.sources.parquet import arrow_errors


class HFDataset(FolderRows):
    """A `datasets.Dataset`, which is memory-mapped Arrow. Media are returned in stored form, without decoding."""

    stored_kind = "DatasetRows"

    def __init__(self, name: str, folder: MediaFolder, dataset: Any) -> None:
        self.name, self.folder = name, folder
        self.dataset, self.features = dataset.with_format("arrow"), undecoded(dataset.features)
        # In JSON columns a null was written by the author of the row, so it is kept.
        self.structs = [name for name in STRUCTS if "Json(" not in repr(self.features.get(name))]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Row:
        try:
            value: Row = self.features.decode_example(self.dataset[row].to_pylist()[0])
        except arrow_errors() as error:
            raise BadRow(f"cannot be read: {first_line(error)}") from None
        check_characters(value)
        return without_nulls(value, self.structs)


def undecoded(feature: Any) -> Any:
    """Return the features with decoding turned off, except for JSON, which is stored as text."""
    from datasets import Json

    if isinstance(feature, dict):
        return type(feature)({name: undecoded(part) for name, part in feature.items()})
    if isinstance(feature, list):
        return [undecoded(part) for part in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=undecoded(feature.feature))
    return replace(feature, decode=False) if hasattr(feature, "decode") and not isinstance(feature, Json) else feature


def open_with_datasets(path: Path, folder: MediaFolder, split: str, is_saved_dataset: bool) -> RowSource:
    """Open a saved dataset, or a file or folder in any format that `datasets` can load.

    Raises:
        UserError: If `datasets` cannot load it.
    """
    import datasets  # takes seconds to import, and most runs do not need it

    try:
        if is_saved_dataset:
            dataset = datasets.load_from_disk(str(path))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            name, files = (str(path), None) if path.is_dir() else (builder_of(path), {split: str(path)})
            offline = datasets.DownloadConfig(local_files_only=True)
            # Read cells as text, so that `NA` and `007` stay unchanged. Only compressed CSV files are read here.
            texts = {"na_filter": False, "dtype": "string", "sep": "\t" if ".tsv" in path.suffixes else ","}
            options = texts if name == "csv" else {}
            dataset = datasets.load_dataset(name, data_files=files, split=split, download_config=offline, **options)
    except Exception as error:  # includes any error of the parsers for formats and compression
        raise UserError(
            f"data source {path} holds no JSONL, Parquet or tar, and `datasets` cannot load it (split {split!r}): "
            f"{first_line(error)}"
        ) from error
    return HFDataset(str(path), folder, dataset)


def builder_of(path: Path) -> str:
    """Return the name of the `datasets` builder for a file, by its suffix."""
    builders = {".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
    # Only compressed JSON files get here: their lines have no random access.
    builders |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".xz", ".bz2") else path.suffix
    if suffix not in builders:
        raise ValueError(f"unknown file type {path.suffix!r}; known: .parquet, .tar, {', '.join(builders)}")
    return builders[suffix]
