"""Download repositories from ModelScope with its own package, which checks sha256 itself."""

from importlib.util import find_spec

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import HubName, RepoType
from omnizoo.hub.model_files import OTHER_WEIGHTS

UNUSED = ["*.py", *(f"*{suffix}" for suffix in OTHER_WEIGHTS)]


def fetch_from_modelscope(name: HubName, repo_type: RepoType, key: str) -> str:
    """Download a repository from ModelScope, without pickles and code, and return its folder.

    Raises:
        UserError: If the package `modelscope` is not installed, or the download fails.
    """
    if find_spec("modelscope") is None:
        raise UserError(f"{key}: {name}: needs the package modelscope. Run `pip install modelscope`.")
    import modelscope

    function = modelscope.dataset_snapshot_download if repo_type == "dataset" else modelscope.snapshot_download
    try:
        folder = function(name.repo, revision=name.revision or "master", ignore_patterns=UNUSED)
    except Exception as error:  # modelscope raises its own classes and those of requests
        raise UserError(
            f"{key}: {name}: ModelScope: {first_line(error)}. Check the name and MODELSCOPE_ENDPOINT."
        ) from (error)
    return f"{folder}/{name.inside}" if name.inside else str(folder)
