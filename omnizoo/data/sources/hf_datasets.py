"""Read rows with the library `datasets`: from a saved dataset, a dataset object, or any file that it can load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omnizoo.config.errors import UserError, first_line
from omnizoo.data.row import STRUCTS, BadRow, Row, check_characters, without_nulls
from omnizoo.data.sources.base import FolderRows, MediaFolder, RowSource
from omnizoo.data.sources.parquet import arrow_errors


class HFDataset(FolderRows):
    """The rows of a `datasets.Dataset`. Media are returned as they are stored, without decoding.

    Args:
        name: Name of the source in error messages.
        folder: The folder of the media files.
        dataset: The `datasets.Dataset`.
    """

    stored_kind = "DatasetRows"

    def __init__(self, name: str, folder: MediaFolder, dataset: Any) -> None:
        self.name = name
        self.folder = folder
        self.dataset = dataset.with_format("arrow")
        self.features = without_decoding(dataset.features)
        # Keep nulls in JSON columns, because the author of the row wrote them. Arrow adds nulls to other columns.
        self.structs = [name for name in STRUCTS if "Json(" not in repr(self.features.get(name))]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> Row:
        """Return a row without decoding its media. Raises `BadRow` if it cannot be read."""
        try:
            value: Row = self.features.decode_example(self.dataset[row].to_pylist()[0])
        except arrow_errors() as error:
            raise BadRow(f"the row is not readable: {first_line(error)}") from None
        check_characters(value)
        return without_nulls(value, self.structs)


def without_decoding(feature: Any) -> Any:
    """Return features that do not decode media. JSON columns are still parsed, because they are stored as text."""
    from datasets import Json

    if isinstance(feature, dict):
        return type(feature)({name: without_decoding(part) for name, part in feature.items()})
    if isinstance(feature, list):
        return [without_decoding(part) for part in feature]
    if hasattr(feature, "feature"):
        return replace(feature, feature=without_decoding(feature.feature))
    if hasattr(feature, "decode") and not isinstance(feature, Json):
        return replace(feature, decode=False)
    return feature


def open_with_datasets(path: Path, folder: MediaFolder, split: str, is_saved_dataset: bool) -> RowSource:
    """Open a saved dataset, or a file or folder in any format that `datasets` can load.

    Args:
        path: The file or folder.
        folder: The folder of the media files.
        split: The split to read.
        is_saved_dataset: Whether the folder was written by `save_to_disk`.

    Raises:
        UserError: If `datasets` cannot load it.
    """
    import datasets  # import it here, because this takes seconds and most runs do not need it

    try:
        if is_saved_dataset:
            dataset = datasets.load_from_disk(str(path))
            if isinstance(dataset, datasets.DatasetDict):
                dataset = dataset[split]
        else:
            dataset = _load_files(path, split)
    except Exception as error:  # the parsers of formats and compression may raise any error
        raise UserError(
            f"{path}: not a JSONL, CSV, Parquet or tar file, and `datasets` failed to load it (split {split!r}): "
            f"{first_line(error)}"
        ) from error
    return HFDataset(str(path), folder, dataset)


def _load_files(path: Path, split: str) -> Any:
    """Return the `datasets.Dataset` of a file, or of all files in a folder."""
    import datasets

    offline = datasets.DownloadConfig(local_files_only=True)
    if path.is_dir():
        return datasets.load_dataset(str(path), data_files=None, split=split, download_config=offline)

    builder = builder_of(path)
    options: dict[str, Any] = {}
    if builder == "csv":
        # Read cells as text, so that `NA` and `007` stay unchanged. This branch is for compressed CSV files only.
        delimiter = "\t" if ".tsv" in path.suffixes else ","
        options = {"na_filter": False, "dtype": "string", "sep": delimiter}
    files = {split: str(path)}
    return datasets.load_dataset(builder, data_files=files, split=split, download_config=offline, **options)


def builder_of(path: Path) -> str:
    """Return the name of the `datasets` builder for a file, by its suffix."""
    builders = {".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
    # JSON files are loaded with `datasets` only if they are compressed, because their lines have no random access then.
    builders |= dict.fromkeys((".json", ".jsonl", ".ndjson"), "json")
    suffix = path.with_suffix("").suffix if path.suffix in (".gz", ".zst", ".xz", ".bz2") else path.suffix
    if suffix not in builders:
        raise ValueError(f"unknown file type {path.suffix!r}; known: .parquet, .tar, {', '.join(builders)}")
    return builders[suffix]
