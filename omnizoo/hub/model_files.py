"""Choose which files of a model repository to download.

These are the settings, the tokenizer and the weights in safetensors. Pickles and code are never downloaded.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from omnizoo.config.errors import UserError

# Patterns of files with settings or tokenizers.
SETTINGS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "additional_chat_templates/*.jinja",
)
# Patterns of files that match `SETTINGS`, but only list weights in other formats.
OTHER_INDEX = ("*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # the files of a PEFT adapter
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl")  # suffixes
INDEX = ".safetensors.index.json"
PIPELINE_INDEX = "model_index.json"  # lists the components of a pipeline of diffusers
SHARD = re.compile(r"(?P<stem>.+)-\d+-of-\d+\.safetensors")


def settings_files(names: Sequence[str]) -> list[str]:
    """Return the files with the settings and the tokenizer of a model, without its weights."""
    chosen = [name for name in names if _matches(name, SETTINGS) and not _matches(name, OTHER_INDEX)]
    return [name for name in chosen if name.count("/") == 0 or name.startswith("additional_chat_templates/")]


def model_files(names: Sequence[str]) -> list[str]:
    """Return the files with the settings, the tokenizer and the weights of a model.

    Args:
        names: All files of the repository.

    Raises:
        UserError: If the repository has no safetensors.
    """
    weights = weight_files(names)
    if not weights:
        others = [name for name in names if name.lower().endswith(OTHER_WEIGHTS)]
        found = f"only {', '.join(others[:3])}" if others else "no weights"
        raise UserError(
            f"the repository has no safetensors, {found}. Choose a repository or a revision with safetensors, such as "
            "refs/convert/safetensors"
        )
    return [*settings_files(names), *weights]


def pipeline_files(names: Sequence[str], with_weights: bool) -> list[str]:
    """Return the files of a pipeline of diffusers: its index, and the settings and weights of its components.

    Weights in the top folder are copies of components in the format of the original release. They are omitted.

    Args:
        names: All files of the repository.
        with_weights: Whether weights are needed in addition to settings.
    """
    chosen = [PIPELINE_INDEX]
    folders = {name.partition("/")[0] for name in names if name.count("/") == 1}
    for folder in sorted(folders):
        below = inside(names, folder)
        settings = settings_files(list(below))
        weights = weight_files(list(below)) if with_weights and settings else []
        chosen += [below[name] for name in (*settings, *weights)]
    return chosen


def weight_files(names: Sequence[str]) -> list[str]:
    """Return safetensors files that contain each weight of a model exactly once.

    If a repository has both shards and a single file, the shards are used, as in transformers. Copies in another format
    (`consolidated.safetensors`) or precision (`model.fp16.safetensors`) are omitted.

    Args:
        names: All files of the repository.
    """
    files = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    sharded = {name.removesuffix(INDEX) for name in names if name.endswith(INDEX)}
    chosen = []
    for name in files:
        match = SHARD.fullmatch(name)
        stem = match["stem"] if match else name.removesuffix(".safetensors")
        is_replaced = match is None and stem in sharded
        is_stray = match is not None and stem not in sharded
        base = stem.partition(".")[0]
        is_variant = "." in stem and (f"{base}.safetensors" in files or base in sharded)
        has_model = "model.safetensors" in files or "model" in sharded
        is_copy = stem.startswith("consolidated") and has_model
        if not (is_replaced or is_stray or is_variant or is_copy):
            chosen.append(name)
    return chosen


def adapter_files(names: Sequence[str]) -> list[str]:
    """Return the files of a PEFT adapter.

    Args:
        names: All files of the repository.

    Raises:
        UserError: If one of them is missing.
    """
    missing = [name for name in ADAPTER if name not in names]
    if missing:
        raise UserError(f"the repository has no {' and no '.join(missing)}. Choose the repository of a PEFT adapter")
    return list(ADAPTER)


def inside(names: Sequence[str], folder: str) -> dict[str, str]:
    """Find the files in a folder of a repository.

    Args:
        names: All files of the repository.
        folder: A folder in the repository; empty for all files. If it is a file, the file is the only result.

    Returns:
        The path of each file in the repository, keyed by its path relative to the folder.
    """
    if not folder:
        return {name: name for name in names}
    if folder in names:
        return {PurePosixPath(folder).name: folder}
    prefix = f"{folder}/"
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
