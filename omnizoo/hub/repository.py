"""List the files of a repository on the hub at one commit.

The list comes from our record of an earlier download, from the hub, or from the cache of huggingface_hub.
"""

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, cached_assets_path, constants, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.hf_api import RepoFile

from omnizoo.config.errors import UserError
from omnizoo.config.hub import HubName, RepoType, snapshot_folder
from omnizoo.hub.errors import HUB_ERRORS, is_unreachable, offline_reason, user_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubFile:
    """A file in a repository."""

    size: int  # bytes
    blob: str = ""  # git hash of a small file; empty for large files, and if it is unknown
    sha256: str = ""  # sha256 of a large file; empty for small files, and if it is unknown


@dataclass(frozen=True)
class Repository:
    """The files of a repository at one commit."""

    name: HubName  # name of the repository, with a commit
    repo_type: RepoType
    files: dict[str, HubFile]  # keyed by the path in the repository
    is_complete: bool = True  # whether `files` contains all files of the commit, and not only the files on disk
    is_from_hub: bool = True  # whether the list comes from the hub; it then includes the hashes of the files

    @property
    def folder(self) -> Path:
        """Folder with the files of the commit in the cache."""
        return snapshot_folder(self.name, self.repo_type)

    def absent(self, names: Iterable[str]) -> list[str]:
        """Return the files in `names` that are not in the cache."""
        return [name for name in names if not (self.folder / name).is_file()]


def resolve(name: HubName, repo_type: RepoType, key: str) -> HubName:
    """Return a name with the commit that its revision refers to.

    This sends one request to the hub, unless the name already has a commit. Without network access, the commit comes
    from the cache.

    Args:
        name: The name.
        repo_type: Type of the repository.
        key: Config key of the repository, for error messages.

    Raises:
        UserError: If the repository or the revision does not exist, or cannot be accessed.
    """
    if name.commit is not None:
        return name
    try:
        revision = HfApi().resolve_revision(
            name.repo, repo_type=repo_type, revision=name.revision, local_files_only=constants.is_offline_mode()
        )
    except HUB_ERRORS as error:
        raise user_error(error, name, repo_type, key) from error
    if revision.resolved == name.revision:
        return HubName(name.prefix, name.repo, name.inside, None, revision.resolved)
    return name.pinned(revision.resolved)


def list_repository(name: HubName, repo_type: RepoType, key: str) -> Repository:
    """List the files of a commit.

    The list comes from the record of an earlier download or, if there is none, from the hub. If the hub cannot be
    reached, the files in the cache are listed.

    Args:
        name: The name, with a commit.
        repo_type: Type of the repository.
        key: Config key of the repository, for error messages.

    Raises:
        UserError: If there is no record, the cache has no files, and the hub does not list them.
    """
    recorded = read_record(name, repo_type)
    if recorded is not None:
        return recorded
    cached = cached_repository(name, repo_type)
    if constants.is_offline_mode() and cached.files:
        return cached
    if constants.is_offline_mode():
        raise UserError(f"{key}: {name.shown}: {offline_reason(name, repo_type)}.")
    try:
        entries = HfApi().list_repo_tree(name.repo, recursive=True, revision=name.commit, repo_type=repo_type)
        repository = Repository(name, repo_type, _files_of(entries))
    except HUB_ERRORS as error:
        if not is_unreachable(error) or not cached.files:
            raise user_error(error, name, repo_type, key) from error
        return cached
    write_record(repository, verified=())
    return repository


def known_repository(name: HubName, repo_type: RepoType) -> Repository:
    """List the files of a commit that was downloaded before, without a network request."""
    return read_record(name, repo_type) or cached_repository(name, repo_type)


def cached_repository(name: HubName, repo_type: RepoType) -> Repository:
    """List the files of a commit from the cache of huggingface_hub.

    If the cache has no list of all files, the files on disk are returned, and `is_complete` is False.
    """
    try:
        tree = get_cached_repo_tree(name.repo, repo_type=repo_type, revision=name.commit)
        files = {file.path: HubFile(file.size) for file in tree}  # this list has no hashes of large files
        return Repository(name, repo_type, files, is_from_hub=False)
    except (CachedRepoTreeNotFoundError, OSError):  # the cache has no list, or another user owns it
        folder = snapshot_folder(name, repo_type)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): HubFile(path.stat().st_size) for path in paths}
        return Repository(name, repo_type, files, is_complete=False, is_from_hub=False)


def _files_of(entries: Iterable[Any]) -> dict[str, HubFile]:
    """Convert a file list of the hub. Entries that are not files are skipped."""
    files = {}
    for entry in entries:
        if isinstance(entry, RepoFile):
            sha256 = entry.lfs.sha256 if entry.lfs is not None else ""
            # For a file in LFS or Xet storage, git contains only a pointer, so its git hash is of no use.
            is_plain = entry.lfs is None and entry.xet_hash is None
            files[entry.path] = HubFile(entry.size, entry.blob_id if is_plain else "", sha256)
    return files


def record_folder(name: HubName, repo_type: RepoType) -> Path:
    """Return the folder with our records of the downloads of a repository, in `HF_HOME/assets/omnizoo`."""
    return cached_assets_path(
        "omnizoo", namespace=f"{repo_type}s", subfolder=name.repo, assets_dir=constants.HF_ASSETS_CACHE
    )


def read_record(name: HubName, repo_type: RepoType) -> Repository | None:
    """Return the files of a commit from our record of a download; None if there is no valid record."""
    fields = _read_fields(name, repo_type)
    if not fields:
        return None
    return Repository(name, repo_type, {path: HubFile(*values) for path, values in fields["files"].items()})


def verified_files(name: HubName, repo_type: RepoType) -> set[str]:
    """Return the files whose hashes were checked after a download, and that have not changed since."""
    folder = snapshot_folder(name, repo_type)
    times = _read_fields(name, repo_type).get("verified", {})
    return {path for path, time in times.items() if _time_of(folder / path) == time}


def _time_of(path: Path) -> int | None:
    """Return the time at which a file was last changed, in nanoseconds; None if it does not exist."""
    return path.stat().st_mtime_ns if path.is_file() else None


def write_record(repository: Repository, verified: Iterable[str]) -> None:
    """Write a record of a download: the files of the commit, and the files with checked hashes.

    Nothing is written if the hub did not list the files, or if the cache is not writable.

    Args:
        repository: The repository.
        verified: Files whose hashes were checked.
    """
    if not repository.is_from_hub:
        return
    name = repository.name
    files = {path: [file.size, file.blob, file.sha256] for path, file in repository.files.items()}
    times = {path: _time_of(repository.folder / path) for path in sorted(verified)}
    text = json.dumps({"files": files, "verified": times})
    try:
        folder = record_folder(name, repository.repo_type)
        partial = folder / f".{name.commit}.{os.getpid()}.partial"
        partial.write_text(text)
        partial.replace(folder / f"{name.commit}.json")
    except OSError as error:
        log.debug("%s: no record of the download: %s", name, error)


def _read_fields(name: HubName, repo_type: RepoType) -> dict[str, Any]:
    """Return the content of the record of a commit; empty if there is none, or if it is damaged."""
    try:
        fields = json.loads((record_folder(name, repo_type) / f"{name.commit}.json").read_text())
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(fields, dict) and isinstance(fields.get("files"), dict) and "verified" in fields
    return fields if is_valid else {}
