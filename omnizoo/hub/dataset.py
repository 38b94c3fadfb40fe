"""Download a dataset from the hub, and find its files in the cache.

Both steps choose the files of a split in the same way.
"""

from dataclasses import dataclass
from pathlib import Path

from omnizoo.config.errors import UserError
from omnizoo.config.hub import HubName
from omnizoo.hub.dataset_files import CARD, SAVED, files_on_card, media_files, row_files
from omnizoo.hub.download import fetch
from omnizoo.hub.errors import download_command, unreachable_reason
from omnizoo.hub.model_files import inside
from omnizoo.hub.repository import Repository, known_repository

MAX_CARD_BYTES = 2**20  # a larger README is not read


@dataclass(frozen=True)
class DatasetFiles:
    """Files of a dataset in the cache."""

    folder: Path  # folder that media paths in the rows are relative to
    rows: list[Path] | None  # files with the rows of the split; None for a folder written by `save_to_disk`
    root: Path  # folder with the content of all files of the repository; the files in `folder` are links to them


def fetch_dataset(repository: Repository, split: str, key: str) -> None:
    """Download the rows of a split, and the media files that they may refer to.

    Args:
        repository: The repository of the dataset.
        split: The split.
        key: Config key of the dataset, for error messages.

    Raises:
        UserError: If the dataset has no such split, or if a file cannot be downloaded.
    """
    if not repository.is_complete:
        name = repository.name
        raise UserError(
            f"{key}: {name.shown}: the cache has {len(repository.files)} files, but no list of the files of the "
            f"dataset, and {unreachable_reason()}. {download_command(name, 'dataset')}."
        )
    if CARD in repository.files:
        fetch(repository, [CARD], key, shows_progress=False)
    try:
        rows = _row_files(repository, split)
    except UserError as error:  # its message starts with the name of the dataset
        raise UserError(f"{key}: {error}") from None
    others: list[str] = []
    if not any(Path(name).name in SAVED for name in rows):
        names = inside(list(repository.files), repository.name.inside)
        others = [names[name] for name in media_files(list(names), rows)]
    fetch(repository, [*rows, *others], key)


def cached_dataset(name: HubName, split: str) -> DatasetFiles:
    """Return the files of a dataset that was downloaded before, without a network request.

    Args:
        name: The name of the dataset, with its commit.
        split: The split.

    Raises:
        UserError: If the cache does not have all files.
    """
    repository = known_repository(name, "dataset")
    rows = _row_files(repository, split)
    missing = repository.absent(rows)
    if missing or not repository.is_complete:
        found = f"the cache lacks {missing[0]}" if missing else "the cache has no list of its files"
        raise UserError(f"{name.shown}: {found}. Run `omnizoo data inspect CONFIG` with network access to download it.")
    folder = repository.folder / name.inside
    if folder.is_file():
        folder = folder.parent
    is_saved = any(Path(row).name in SAVED for row in rows)
    files = None if is_saved else [repository.folder / row for row in rows]
    return DatasetFiles(folder, files, root=repository.folder.parents[1])


def files_in_split(name: HubName, split: str) -> list[str]:
    """Return the files with the rows of a split, for a dataset whose files have been listed before."""
    return _row_files(known_repository(name, "dataset"), split)


def _row_files(repository: Repository, split: str) -> list[str]:
    """Return the files of a repository with the rows of a split.

    The header of the README determines them. If it does not, their names do.

    Raises:
        UserError: If there are none.
    """
    name = repository.name
    source = f"{name.prefix}{name.address}"
    names = inside(list(repository.files), name.inside)
    if not names:
        raise UserError(f"{source}: the repository has no file or folder {name.inside}. Check the path after the name.")
    card = repository.folder / CARD
    if not name.inside and card.is_file() and card.stat().st_size <= MAX_CARD_BYTES:
        described = files_on_card(list(names), card.read_text(encoding="utf-8", errors="replace"), split, source)
        if described is not None:
            return described
    return [names[row] for row in row_files(list(names), split, source)]
