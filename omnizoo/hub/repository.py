"""A repository on the hub at one commit: its files, as recorded next to the cache, listed by the hub, or on disk."""

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

    size: int
    blob: str = ""  # git hash of a small file; empty if unknown
    sha256: str = ""  # of a large file; empty for small files


@dataclass(frozen=True)
class Repository:
    """The files of a repository at one commit."""

    name: HubName  # with its commit
    repo_type: RepoType
    files: dict[str, HubFile]  # by path in the repository
    is_complete: bool = True  # whether `files` lists all files of the commit, not only those on disk
    is_from_hub: bool = True  # whether the hub listed the files, with their hashes

    @property
    def folder(self) -> Path:
        """Folder of the snapshot in the cache."""
        return snapshot_folder(self.name, self.repo_type)

    def absent(self, names: Iterable[str]) -> list[str]:
        """Return those of the files `names` that are not in the cache."""
        return [name for name in names if not (self.folder / name).is_file()]


def resolve(name: HubName, repo_type: RepoType, key: str) -> HubName:
    """Return `name` with the commit of its revision. Sends one request, unless the commit is in the name.

    Without network, the commit is the one that the cache has for the revision.

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
    """Return the files of a commit: from the record of an earlier download, from the hub, or from the cache.

    Raises:
        UserError: If the files are neither recorded nor cached, and the hub does not list them.
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
    """Return the files of a commit that was downloaded before, without a request."""
    return read_record(name, repo_type) or cached_repository(name, repo_type)


def cached_repository(name: HubName, repo_type: RepoType) -> Repository:
    """Return the files of a commit as the cache of huggingface_hub lists them, or else those on disk."""
    try:
        tree = get_cached_repo_tree(name.repo, repo_type=repo_type, revision=name.commit)
        files = {file.path: HubFile(file.size) for file in tree}  # hashes of large files are not in this list
        return Repository(name, repo_type, files, is_from_hub=False)
    except (CachedRepoTreeNotFoundError, OSError):  # never listed, or listed by another user of the cache
        folder = snapshot_folder(name, repo_type)
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): HubFile(path.stat().st_size) for path in paths}
        return Repository(name, repo_type, files, is_complete=False, is_from_hub=False)


def _files_of(entries: Iterable[Any]) -> dict[str, HubFile]:
    """Return the files in a listing of the hub."""
    files = {}
    for entry in entries:
        if isinstance(entry, RepoFile):
            sha256 = entry.lfs.sha256 if entry.lfs is not None else ""
            is_plain = entry.lfs is None and entry.xet_hash is None  # otherwise the git hash is that of a pointer
            files[entry.path] = HubFile(entry.size, entry.blob_id if is_plain else "", sha256)
    return files


def record_folder(name: HubName, repo_type: RepoType) -> Path:
    """Return the folder of our records of a repository: `HF_HOME/assets/omnizoo/...`."""
    return cached_assets_path(
        "omnizoo", namespace=f"{repo_type}s", subfolder=name.repo, assets_dir=constants.HF_ASSETS_CACHE
    )


def read_record(name: HubName, repo_type: RepoType) -> Repository | None:
    """Return the recorded files of a commit; None if there is no usable record."""
    fields = _read_fields(name, repo_type)
    if not fields:
        return None
    return Repository(name, repo_type, {path: HubFile(*values) for path, values in fields["files"].items()})


def verified_files(name: HubName, repo_type: RepoType) -> set[str]:
    """Return the files whose hashes were checked, and that have not been written since."""
    folder = snapshot_folder(name, repo_type)
    times = _read_fields(name, repo_type).get("verified", {})
    return {path for path, time in times.items() if _time_of(folder / path) == time}


def _time_of(path: Path) -> int | None:
    """Return the time of the last change of a file; None if it does not exist."""
    return path.stat().st_mtime_ns if path.is_file() else None


def write_record(repository: Repository, verified: Iterable[str]) -> None:
    """Record the files of a commit and those with checked hashes, if the hub listed them.

    A cache that is not writable gets no record.
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
