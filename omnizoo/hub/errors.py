"""Error messages of one line for everything that can go wrong with the hub or a download."""

import os
from pathlib import Path

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import HubName, RepoType, repository_folder

# Errors that huggingface_hub raises for problems with the network, access or damaged downloads.
HUB_ERRORS = (OSError, httpx2.HTTPError, RevisionResolutionError, HFValidationError, RuntimeError)
# Errors of a connection that broke after the hub had answered.
BROKEN = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.ReadTimeout)
MAX_LISTED = 5  # maximum number of names that a message lists


def is_unreachable(error: BaseException) -> bool:
    """Whether an error means that the hub cannot be reached or is down. Files in the cache may then be used."""
    cause = cause_of(error)
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code >= 500
    unreachable = (httpx2.ConnectError, httpx2.TimeoutException, OfflineModeIsEnabled, RevisionResolutionError)
    return isinstance(cause, unreachable)


def cause_of(error: BaseException) -> BaseException:
    """Return the original error if huggingface_hub reports it as a file that is missing in the cache.

    Otherwise, return `error` itself.
    """
    if isinstance(error, LocalEntryNotFoundError | RevisionResolutionError) and error.__cause__ is not None:
        return error.__cause__
    return error


def user_error(error: BaseException, name: HubName, repo_type: RepoType, key: str) -> UserError:
    """Convert an error of huggingface_hub to an error for the user, with a message of one line.

    Args:
        error: The error.
        name: The repository.
        repo_type: Type of the repository.
        key: Config key of the repository. The message starts with it.
    """
    return UserError(f"{key}: {name.shown}: {_explain(cause_of(error), name, repo_type)}.")


def _explain(error: BaseException, name: HubName, repo_type: RepoType) -> str:
    """Return the problem and the advice, without a period at the end."""
    # The order of the checks matters: a class must be checked before its base classes.
    endpoint = constants.ENDPOINT
    if isinstance(error, HFValidationError):
        return f"neither a folder nor a valid name of a {repo_type} on the hub. Write ORG/NAME"
    if isinstance(error, GatedRepoError):
        if error.response.status_code == 403:
            return f"the token has no access to this gated {repo_type}. Accept its terms on {_page(name, repo_type)}"
        return f"this {repo_type} is gated. Accept its terms on {_page(name, repo_type)} and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        other = "dataset" if repo_type == "model" else "model"
        return (
            f"neither a folder here nor a {repo_type} on {endpoint}, or it is private. Check the name, HF_TOKEN, and "
            f"whether it is a {other}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the {repo_type} has no revision {name.revision}. Write a branch, a tag or a full commit after @"
    if isinstance(error, RemoteEntryNotFoundError):
        return f"a file is missing on the hub: {first_line(error)}"
    if isinstance(error, DisabledRepoError):
        return f"the {repo_type} is disabled on {endpoint}"
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, name, repo_type)
    if isinstance(error, PermissionError):
        return f"the cache is not writable ({error.filename}). Set HF_HOME to a folder that you can write to"
    if isinstance(error, BROKEN):
        return f"the connection broke ({type(error).__name__}). Run again; complete files are kept"
    if is_unreachable(error):
        return offline_reason(name, repo_type)
    if isinstance(error, httpx2.ProxyError):
        return f"the proxy refused the connection to {endpoint}: {first_line(error)}. Check HTTPS_PROXY and NO_PROXY"
    if isinstance(error, RuntimeError) and "Task error" in str(error):
        return "the Xet storage of the hub cannot be reached. Set HF_HUB_DISABLE_XET=1 and run again"
    if "Consistency check" in str(error):
        return "a file was shorter than the hub announced. Run again; complete files are kept"
    return f"the download failed: {first_line(error)}. Run again; complete files are kept"


def _explain_status(error: HfHubHTTPError, name: HubName, repo_type: RepoType) -> str:
    """Return the problem and the advice for an HTTP status without a specific error class."""
    status = error.response.status_code
    endpoint = constants.ENDPOINT
    if status == 401:
        return f"{endpoint} rejected the token. Set a valid HF_TOKEN, or unset it and run `hf auth logout`"
    if status == 429:
        return f"{endpoint} answered that there were too many requests. Wait some minutes, and set HF_TOKEN"
    if status >= 500:
        return f"{endpoint} is down (HTTP {status}). Run again later. {cache_content(name, repo_type)}"
    return f"{endpoint} answered with HTTP {status}. Check HF_ENDPOINT and HF_TOKEN"


def _page(name: HubName, repo_type: RepoType) -> str:
    """Return the address of the web page of a repository."""
    folder = "datasets/" if repo_type == "dataset" else ""
    return f"{constants.ENDPOINT}/{folder}{name.repo}"


def offline_reason(name: HubName, repo_type: RepoType) -> str:
    """Return why a repository cannot be used without network access, the content of the cache, and the advice."""
    reason = f"not in the cache, and {unreachable_reason()}"
    return f"{reason}. {cache_content(name, repo_type)}. {download_command(name, repo_type)}"


def unreachable_reason() -> str:
    """Return why no request can be sent: offline mode, or a hub that cannot be reached."""
    return "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"


def cache_content(name: HubName, repo_type: RepoType) -> str:
    """Return a sentence about the cache: other commits of the repository or, if there are none, other repositories."""
    folder = repository_folder(name, repo_type)
    commits = sorted(path.name for path in (folder / "snapshots").glob("*"))
    if commits:
        return f"The cache in {folder.parent} contains {name.repo} at {_listed(commits)}"
    prefix = f"{repo_type}s--"
    repositories = sorted(path.name for path in folder.parent.glob(f"{prefix}*") if any(path.glob("snapshots/*")))
    names = [repository.removeprefix(prefix).replace("--", "/", 1) for repository in repositories]
    return f"The cache in {folder.parent} contains {_listed(names) if names else f'no {repo_type}'}"


def _listed(names: list[str]) -> str:
    """Return the first names as text, with the number of names that are not listed."""
    listed = ", ".join(names[:MAX_LISTED])
    num_others = len(names) - MAX_LISTED
    return f"{listed} and {num_others} more" if num_others > 0 else listed


def download_command(name: HubName, repo_type: RepoType) -> str:
    """Return advice with the command that downloads a repository on another machine."""
    options = " --repo-type dataset" if repo_type == "dataset" else ""
    revision = name.commit or name.revision
    if revision:
        options += f" --revision {revision}"
    return f"Run `hf download {name.repo}{options}` on a machine with network access and the same cache"


def check_free_space(needed: int, folder: Path, name: HubName, key: str) -> None:
    """Check that a download fits on the disk of the cache.

    Without this check, huggingface_hub would only print a warning, and fail when the disk is full.

    Args:
        needed: Size of the download in bytes.
        folder: Folder of the cache.
        name: The repository.
        key: Config key of the repository, for the error message.

    Raises:
        UserError: If there is not enough space.
    """
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise UserError(
            f"{key}: {name.shown}: the download has {readable_size(needed)}, but only {readable_size(free)} are free "
            f"in {folder}. Free some space, or set HF_HOME to a folder on a larger disk."
        )


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes as text, such as `1.5 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
