"""Rows of a `datasets.Dataset`: a folder that it has saved, any file that it can read, or an object of the user's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.parquet_rows import arrow_errors
from omnizoo.data.rows import STRUCTS, BadRow, Folder, Row, RowSource, check_characters, without_nulls


class DatasetRows(RowSource):
    """Whatever `datasets` has opened: memory-mapped Arrow. Media stay as they are stored."""

    def __init__(self, name: str, folder: Folder, dataset: Any) -> None:
        self.name, self.folder = name, folder
        self.dataset, self.features = dataset.with_format("arrow"), undecoded(dataset.features)
        # where columns are JSON, a null is one that its author wrote
        self.structs = [name for name in STRUCTS if "Json(" not in repr(self.features.get(name))]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Row:
        try:
            value: Row = self.features.decode_example(self.dataset[row].to_pylist()[0])
        except arrow_errors(RecursionError) as error:
            raise BadRow(f"cannot be read: {first_line(error)}") from None
        check_characters(value)
        return without_nulls(value, self.structs)

    def find(self, row: int, name: str) -> Path:
        return self.folder.find(name)

    def where(self, row: int) -> str:
        return f"{self.name} row {row}"


def undecoded(feature: Any) -> Any:
    """Features of `datasets` such that only JSON, which is stored as text, is decoded."""
    from datasets import Json

    if isinstance(feature, dict):
        return type(feature)({name: undecoded(part) for name, part in feature.items()})
    if isinstance(feature, list):
        return [undecoded(part) for part in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=undecoded(feature.feature))
    return replace(feature, decode=False) if hasattr(feature, "decode") and not isinstance(feature, Json) else feature


def open_with_datasets(path: Path, folder: Folder, split: str, is_saved_dataset: bool) -> RowSource:
    import datasets  # seconds to import, and most runs never need it

    try:
        if is_saved_dataset:
            dataset = datasets.load_from_disk(str(path))
            dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            name, files = (str(path), None) if path.is_dir() else (builder_of(path), {split: str(path)})
            offline = datasets.DownloadConfig(local_files_only=True)
            # Cells of CSV (which are here only if compressed) are texts: `NA` and `007` stay as they are.
            texts = {"na_filter": False, "dtype": "string", "sep": "\t" if ".tsv" in path.suffixes else ","}
            options = texts if name == "csv" else {}
            dataset = datasets.load_dataset(name, data_files=files, split=split, download_config=offline, **options)
    except Exception as error:  # it hands on whatever the parser of the format, or of its compression, raises
        raise UserError(
            f"data source {path} holds no JSONL, Parquet or tar, and `datasets` cannot load it (split {split!r}): "
            f"{first_line(error)}"
        ) from error
    return DatasetRows(str(path), folder, dataset)


def builder_of(path: Path) -> str:
    builders = {".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow", ".json": "json"}
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".xz", ".bz2") else path.suffix
    if suffix in (".jsonl", ".ndjson"):
        return "json"  # compressed: no random access to its lines
    if suffix not in builders:
        raise ValueError(f"unknown file type {path.suffix!r}; known: .jsonl, .parquet, .tar, {', '.join(builders)}")
    return builders[suffix]
