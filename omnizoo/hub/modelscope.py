"""Download repositories from ModelScope with the package `modelscope`. The package checks the hashes of the files."""

from importlib.util import find_spec

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import HubName, RepoType
from omnizoo.hub.model_files import OTHER_WEIGHTS

UNUSED = ["*.py", *(f"*{suffix}" for suffix in OTHER_WEIGHTS)]  # patterns of files that are not downloaded


def fetch_from_modelscope(name: HubName, repo_type: RepoType, key: str) -> str:
    """Download a repository from ModelScope, except pickles and code.

    Args:
        name: The name of the repository.
        repo_type: Type of the repository.
        key: Config key of the repository, for error messages.

    Returns:
        The folder of the repository, or the folder or file in it that the name refers to.

    Raises:
        UserError: If the package `modelscope` is not installed, or the download fails.
    """
    if find_spec("modelscope") is None:
        raise UserError(f"{key}: {name}: the package modelscope is not installed. Run `pip install modelscope`.")
    import modelscope

    function = modelscope.dataset_snapshot_download if repo_type == "dataset" else modelscope.snapshot_download
    try:
        folder = function(name.repo, revision=name.revision or "master", ignore_patterns=UNUSED)
    except Exception as error:  # modelscope raises its own error classes, and error classes of the package requests
        raise UserError(
            f"{key}: {name}: ModelScope: {first_line(error)}. Check the name and MODELSCOPE_ENDPOINT."
        ) from error
    return f"{folder}/{name.inside}" if name.inside else str(folder)
