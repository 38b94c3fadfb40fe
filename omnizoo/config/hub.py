"""Names of repositories on the Hugging Face Hub and ModelScope, as values of keys that also accept folders.

A name is `ORG/NAME`, optionally followed by `@REVISION` (a branch, tag or commit). If a folder with that name exists,
it takes precedence; the prefix `hub:` or `modelscope:` prevents this.

A download appends the commit to the name: `ORG/NAME@COMMIT` or `ORG/NAME@REVISION@COMMIT`. A name with a commit refers
to one folder in the cache of huggingface_hub, so using it again needs no network request.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omnizoo.config.errors import UserError

RepoType = Literal["model", "dataset"]
HUB = "hub:"
MODELSCOPE = "modelscope:"
PREFIXES = (HUB, MODELSCOPE)
COMMIT_AT_END = re.compile("@[0-9a-f]{40}$")
PART = r"[A-Za-z0-9][\w.-]*"
REVISION = r"(?:@(?P<revision>[^@\s]+?))??(?:@(?P<commit>[0-9a-f]{40}))?"
PLAIN_NAME = re.compile(rf"(?P<repo>{PART}/{PART})(?P<inside>){REVISION}")
PREFIXED_NAME = re.compile(rf"(?P<repo>{PART}(?:/{PART})?)(?P<inside>(?:/{PART})*){REVISION}")
# A text with such a suffix is treated as the path of a file, not as the name of a repository.
FILE_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".tar", ".txt", ".yaml", ".yml", ".zip")


@dataclass(frozen=True)
class HubName:
    """The parsed name of a repository, or of a folder or file in it."""

    prefix: str  # `hub:`, `modelscope:` or empty
    repo: str
    inside: str  # path of a folder or file in the repository; empty for the whole repository
    revision: str | None  # branch, tag or commit as the user wrote it; None for the default branch
    commit: str | None  # None until the revision is resolved

    def __str__(self) -> str:
        suffixes = [f"@{part}" for part in (self.revision, self.commit) if part is not None]
        return "".join([self.prefix, self.address, *suffixes])

    @property
    def address(self) -> str:
        """The repository and the path in it, without prefix and revision."""
        return f"{self.repo}/{self.inside}" if self.inside else self.repo

    @property
    def shown(self) -> str:
        """The name as the user wrote it, without the commit that the download added."""
        return str(replace(self, commit=None))

    def pinned(self, commit: str) -> "HubName":
        """Return the name with `commit`, the commit that its revision currently refers to."""
        return replace(self, commit=commit)


def parse_name(text: str) -> HubName | None:
    """Parse the name of a repository; return None if `text` is a path or an address such as `s3://...`.

    Raises:
        UserError: If the text has a prefix, but is not a valid name.
    """
    prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), "")
    pattern = PREFIXED_NAME if prefix else PLAIN_NAME
    match = pattern.fullmatch(text.removeprefix(prefix))
    if match is None:
        if prefix:
            raise UserError(f"{text}: not a valid name. Write {prefix}ORG/NAME or {prefix}ORG/NAME@REVISION.")
        return None
    name = HubName(prefix, match["repo"], match["inside"].lstrip("/"), match["revision"], match["commit"])
    is_certain = bool(prefix) or name.commit is not None
    return name if is_certain or not _looks_like_path(text) else None


def _looks_like_path(text: str) -> bool:
    """Whether a text without prefix and commit is a path rather than the name of a repository.

    It is a path if it exists, if its first folder exists, or if it has the suffix of a file.
    """
    first_part = text.partition("/")[0]
    return Path(text).exists() or Path(first_part).exists() or text.lower().endswith(FILE_SUFFIXES)


def without_revision(text: str) -> str:
    """Return the name of a repository without its revision and commit, and any other text unchanged."""
    name = parse_name(text) if "@" in text else None
    return text if name is None else f"{name.prefix}{name.address}"


def pinned_names(value: Any) -> list[HubName]:
    """Return all different repository names with a commit in a saved config.

    Args:
        value: Nested mappings, lists and plain values. Repositories on ModelScope are omitted.
    """
    if isinstance(value, str):
        name = parse_name(value) if COMMIT_AT_END.search(value) else None
        return [name] if name is not None and name.prefix != MODELSCOPE else []
    children: Iterable[Any] = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    names: dict[HubName, None] = {}  # a dict as an ordered set
    for child in children:
        names.update(dict.fromkeys(pinned_names(child)))
    return list(names)


def local_path(text: str, repo_type: RepoType = "model") -> str:
    """Return the cached folder or file that a name with a commit refers to, and any other text unchanged."""
    if "@" not in text:
        return text
    name = parse_name(text)
    if name is None or name.commit is None or name.prefix == MODELSCOPE:
        return text
    return str(snapshot_folder(name, repo_type) / name.inside)


def snapshot_folder(name: HubName, repo_type: RepoType) -> Path:
    """Return the folder of a commit in the cache of huggingface_hub."""
    assert name.commit is not None
    return repository_folder(name, repo_type) / "snapshots" / name.commit


def repository_folder(name: HubName, repo_type: RepoType) -> Path:
    """Return the folder of a repository in the cache of huggingface_hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{repo_type}s--{name.repo.replace('/', '--')}"
