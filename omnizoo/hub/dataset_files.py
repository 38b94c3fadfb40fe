"""Choose files of a dataset by their names: files with rows of a split, and media that rows may refer to.

The rules are the same for local folders, remote addresses and repositories on the hub. A repository may instead
describe its subsets and splits in the header of its README.
"""

import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath, PurePosixPath
from typing import Any

import yaml

from omnizoo.config.errors import UserError, first_line

log = logging.getLogger(__name__)
PARQUET = (".parquet",)
TAR = (".tar",)
JSON_LINES = (".jsonl", ".ndjson", ".json")
CSV = {".csv": ",", ".tsv": "\t"}  # suffixes and their delimiters
ROW_FILES = (*PARQUET, *TAR, *JSON_LINES, *CSV)
SAVED = ("dataset_dict.json", "dataset_info.json")  # files that mark a folder written by `save_to_disk`
NOT_ROWS = ("dataset_infos.json",)  # files that describe a dataset on the hub and have no rows
# Patterns for split names in the names of files and folders, the same as in `datasets`. They only match whole words:
# `test` does not match `contest.jsonl`.
SPLIT_WORDS = {
    "train": "train(?:ing)?",
    "validation": "valid(?:ation)?|val|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}
CARD = "README.md"  # the dataset card
MAX_PATTERNS = 10_000  # maximum number of file patterns in a dataset card
# Suffixes of code, pickles and archives. Such files are never read, so they are not downloaded.
UNUSED = (".py", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".npy", ".npz", ".zip", ".gz", ".tgz", ".zst", ".xz", ".7z")
UNUSED_TEXT = (".md", ".gitattributes", ".gitignore", ".yaml", ".yml")  # suffixes of texts that are not downloaded


def has_rows(name: PurePath) -> bool:
    """Whether a file contains rows, judging by its name. Hidden files contain none."""
    is_hidden = any(part.startswith(".") for part in name.parts)
    return name.suffix in ROW_FILES and name.name not in NOT_ROWS and not is_hidden


def row_files(names: list[str], split: str, source: str) -> list[str]:
    """Return the files of a folder that contain rows of a split.

    Args:
        names: All files in the folder, as relative paths.
        split: The split.
        source: Name of the folder, for error messages.

    Raises:
        UserError: If there are none.
    """
    if any(name in SAVED for name in names):
        return names
    with_rows = [name for name in names if has_rows(PurePosixPath(name))]
    if not with_rows:
        listed = ", ".join(names[:5]) or "nothing"
        raise UserError(f"{source}: no file with rows ({', '.join(ROW_FILES)}); the folder contains {listed}")
    return files_of_split(with_rows, split, source)


def files_of_split(names: list[str], split: str, source: str) -> list[str]:
    """Return the files of a split. If the file names contain fewer than two splits, return all files.

    Args:
        names: The files with rows, as relative paths.
        split: The split.
        source: Name of the folder, for error messages.

    Raises:
        UserError: If the file names contain several splits, but not this one.
    """
    splits: dict[str, list[str]] = {}
    for file in names:
        for name, words in SPLIT_WORDS.items():
            if re.search(rf"(?:^|[\W_\d])(?:{words})(?:[\W_\d]|$)", file, re.IGNORECASE):
                splits.setdefault(name, []).append(file)
                break
    if len(splits) < 2:
        return names
    if split not in splits:
        raise UserError(
            f"{source}: the source has the splits {', '.join(splits)}, not {split!r}. Set `split` of the source."
        )
    log.info("%s: reading the %d files of split %s", source, len(splits[split]), split)
    return splits[split]


def media_files(names: Sequence[str], rows: Sequence[str]) -> list[str]:
    """Return the media files that rows may refer to.

    Args:
        names: All files of the dataset.
        rows: The files with rows. Parquet and tar files contain their media, so these need no other files.
    """
    if all(name.endswith((*PARQUET, *TAR)) for name in rows):
        return []
    chosen = []
    for name in names:
        path = PurePosixPath(name)
        is_hidden = any(part.startswith(".") for part in path.parts)
        is_unused = path.suffix.lower() in (*UNUSED, *UNUSED_TEXT, *ROW_FILES) or path.name.startswith("LICENSE")
        if not is_hidden and not is_unused:
            chosen.append(name)
    return chosen


def files_on_card(names: Sequence[str], card: str, split: str, source: str) -> list[str] | None:
    """Return the files with the rows of a split, as described by the header of a README; None if it describes none.

    Args:
        names: All files of the repository.
        card: Content of the README.
        split: The split to read.
        source: Name of the repository, for error messages.

    Raises:
        UserError: If the README describes several subsets without a default, or lacks the split.
    """
    configs = _configs(card, source)
    if not configs:
        return None
    config = _default_config(configs, names, source)
    patterns = _patterns_by_split(config)
    if len(patterns) > 1 and split not in patterns:
        raise UserError(
            f"{source}: the source has the splits {', '.join(patterns)}, not {split!r}. Set `split` of the source."
        )
    chosen = patterns.get(split) or next(iter(patterns.values()))
    files = [name for name in names if any(_fits(name, pattern) for pattern in chosen)]
    files = [name for name in files if has_rows(PurePosixPath(name))]
    if not files:
        raise UserError(f"{source}: no file with rows ({', '.join(ROW_FILES)}) matches {', '.join(chosen[:3])}")
    return files


def _configs(card: str, source: str) -> list[dict[str, Any]]:
    """Return the subsets that the header of a README describes, if they have data files."""
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", card, re.DOTALL)
    try:
        header = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: the header of {CARD} is not valid YAML: {first_line(error)}") from None
    configs = header.get("configs") if isinstance(header, dict) else None
    listed = configs if isinstance(configs, list) else []
    return [config for config in listed if isinstance(config, dict) and config.get("data_files")]


def _default_config(configs: list[dict[str, Any]], names: Sequence[str], source: str) -> dict[str, Any]:
    """Return the subset to read: the only one, or the default one. Raises `UserError` if there is no default."""
    for config in configs:
        if len(configs) == 1 or config.get("default") is True or config.get("config_name") == "default":
            return config
    subsets = ", ".join(str(config.get("config_name")) for config in configs[:8])
    folders = sorted({name.partition("/")[0] for name in names if "/" in name and has_rows(PurePosixPath(name))})
    example = folders[0] if folders else "FILE"
    raise UserError(
        f"{source}: the dataset has the subsets {subsets}. Choose a folder or file of one of them: "
        f"path: hub:{source.removeprefix('hub:')}/{example}"
    )


def _patterns_by_split(config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the file patterns of each split of a subset."""
    data_files = config["data_files"]
    folder = config.get("data_dir")
    prefix = f"{folder}/" if folder else ""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        split = str(entry.get("split", "train")) if isinstance(entry, dict) else "train"
        paths = entry.get("path", []) if isinstance(entry, dict) else entry
        for path in paths if isinstance(paths, list) else [paths]:
            patterns.setdefault(split, []).append(prefix + str(path))
            if len(patterns[split]) > MAX_PATTERNS:  # YAML aliases can multiply the patterns of a small file
                raise UserError(f"{CARD}: more than {MAX_PATTERNS:,} patterns of data files")
    return patterns


def _fits(name: str, pattern: str) -> bool:
    """Whether a file matches a pattern of a README. `**/` matches any number of folders, including none."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("**/", ""))
