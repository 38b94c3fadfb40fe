"""Find the names of hub repositories in a config, pin them to commits, and download their files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from omnizoo.config.errors import UserError
from omnizoo.config.hub import MODELSCOPE, HubName, RepoType, local_path, parse_name, pinned_names
from omnizoo.config.schema import Config
from omnizoo.config.yaml_file import parse_yaml, read_text


@dataclass(frozen=True)
class HubReference:
    """A config key whose value names a repository."""

    key: str
    name: HubName
    repo_type: RepoType
    use: str  # needed part: `model`, `settings`, `component`, `adapter`, or the split of a dataset


def references(config: Config, with_weights: bool = True, with_data: bool = True) -> Iterator[HubReference]:
    """Yield every key of a config whose value names a repository.

    Args:
        config: The config.
        with_weights: Whether the weights of the model are needed in addition to its settings and its tokenizer.
        with_data: Whether to include the data.

    Raises:
        UserError: If a value has the prefix of a hub, but is not a valid name.
    """
    model = config.model
    weights = "model" if with_weights else "settings"
    texts: list[tuple[str, Any, str]] = [
        ("model.path", model.path, weights),
        ("model.config", model.config, "settings"),
        ("model.tokenizer", model.tokenizer, "settings"),
    ]
    if model.foundation is not None:
        texts.append(("model.foundation.path", model.foundation.path, weights))
        texts.append(("model.foundation.config", model.foundation.config, "settings"))
    for modality, settings in model.modalities.items():
        for role, part in (("encoder", settings.encoder), ("decoder", settings.decoder)):
            if part is not None:
                key = f"model.modalities.{modality}.{role}"
                texts += [(f"{key}.path", part.path, "component"), (f"{key}.config", part.config, "settings")]
    if model.adapter is not None:
        texts.append(("model.adapter.path", model.adapter.path, "adapter"))
    for i, loss in enumerate(config.train.losses):
        if with_weights:
            texts.append((f"train.losses.{i}.options.reference", loss.options.get("reference"), "model"))
    for key, text, use in texts:
        name = _name_in(text, key)
        if name is not None:
            yield HubReference(key, name, "model", use)
    if with_data:
        yield from _data_references(config)


def _data_references(config: Config) -> Iterator[HubReference]:
    """Yield every data source that is a dataset on a hub."""
    for section, sources in (("sources", config.data.sources), ("eval_sources", config.data.eval_sources)):
        for i, source in enumerate(sources):
            key = f"data.{section}.{i}.path"
            name = _name_in(source.path, key)
            if name is not None:
                yield HubReference(key, name, "dataset", source.split)


def _name_in(value: Any, key: str) -> HubName | None:
    """Return the repository that a config value names; None for paths, and for values that are not text."""
    if not isinstance(value, str):
        return None
    try:
        return parse_name(value)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def pin(config: Config, with_weights: bool = True, with_data: bool = True) -> dict[str, str]:
    """Find the commit of each repository in a config.

    One request is sent for each name without a commit. Names on ModelScope stay unchanged, because its package does not
    report commits. A run that resumes uses the commits of its newest checkpoint, even if a branch has changed since.

    Args:
        config: The config.
        with_weights: Whether the weights of the model are needed in addition to its settings and its tokenizer.
        with_data: Whether to include the data.

    Returns:
        The name with its commit, for each key whose value names a repository.

    Raises:
        UserError: If a repository does not exist or cannot be accessed.
    """
    listed = list(references(config, with_weights, with_data))
    if not listed:
        return {}
    from omnizoo.hub.repository import resolve

    commits: dict[tuple[RepoType, str, str | None], str] = _saved_commits(config)
    pins = {}
    for reference in listed:
        name = reference.name
        if name.prefix == MODELSCOPE:
            pins[reference.key] = str(name)
            continue
        identity = (reference.repo_type, name.repo, name.revision)
        if name.commit is None and identity in commits:
            name = name.pinned(commits[identity])
        resolved = resolve(name, reference.repo_type, reference.key)
        assert resolved.commit is not None
        commits[identity] = resolved.commit
        pins[reference.key] = str(resolved)
    return pins


def download(config: Config, with_weights: bool = True, with_data: bool = True) -> dict[str, str]:
    """Download the files of all repositories in a config.

    Args:
        config: A config. All names, except names on ModelScope, have commits.
        with_weights: Whether the weights of the model are needed in addition to its settings and its tokenizer.
        with_data: Whether to include the data.

    Returns:
        The folder of each repository on ModelScope, keyed by config key.

    Raises:
        UserError: If a file cannot be downloaded.
    """
    folders = {}
    for reference in references(config, with_weights, with_data):
        if reference.name.prefix == MODELSCOPE:
            from omnizoo.hub.modelscope import fetch_from_modelscope

            folders[reference.key] = fetch_from_modelscope(reference.name, reference.repo_type, reference.key)
        else:
            _download_one(reference)
    return folders


def _download_one(reference: HubReference) -> None:
    """Download the files of a repository that the config key needs."""
    from omnizoo.hub.dataset import fetch_dataset
    from omnizoo.hub.download import fetch
    from omnizoo.hub.repository import list_repository

    name, key = reference.name, reference.key
    repository = list_repository(name, reference.repo_type, key)
    if reference.repo_type == "dataset":
        fetch_dataset(repository, reference.use, key)
        return
    try:
        chosen = choose_model_files(list(repository.files), name.inside, reference.use)
    except UserError as error:
        raise UserError(f"{key}: {name.shown}: {error}.") from None
    fetch(repository, chosen, key)


def choose_model_files(names: Sequence[str], folder: str, use: str) -> list[str]:
    """Choose the files of a model repository to download.

    Args:
        names: All files of the repository.
        folder: The folder of the model in the repository; empty for the top folder.
        use: What is needed from the model, as in `HubReference`.

    Raises:
        UserError: If the repository has no model that can be used in this way.
    """
    from omnizoo.hub.model_files import (
        PIPELINE_INDEX,
        adapter_files,
        inside,
        model_files,
        pipeline_files,
        settings_files,
        weight_files,
    )

    below = inside(names, folder)
    relative = list(below)
    if PIPELINE_INDEX in relative and "config.json" not in relative and use != "adapter":
        return [below[name] for name in pipeline_files(relative, with_weights=use != "settings")]
    if use == "adapter":
        chosen = adapter_files(relative)
    elif use == "component":
        chosen = [*settings_files(relative), *weight_files(relative)]
    else:
        chosen = model_files(relative) if use == "model" else settings_files(relative)
    if not chosen or (use == "model" and "config.json" not in chosen):
        listed = ", ".join(list(names)[:5]) or "nothing"
        location = f" in {folder}" if folder else ""
        raise UserError(f"the repository has no config.json{location}; it contains {listed}")
    return [below[name] for name in chosen]


def resolve_names(config: Config, with_weights: bool = True, with_data: bool = True) -> tuple[Config, dict[str, str]]:
    """Pin all hub names of a config to commits, and download their files in this process.

    Args:
        config: The config.
        with_weights: Whether the weights of the model are needed in addition to its settings and its tokenizer.
        with_data: Whether to include the data.

    Returns:
        The config with pinned names (or folders, for repositories on ModelScope), and the new value of each such key.

    Raises:
        UserError: If a name does not exist, cannot be accessed, or cannot be downloaded.
    """
    values = pin(config, with_weights, with_data)
    config = with_values(config, values)
    folders = download(config, with_weights, with_data)
    return with_values(config, folders), values | folders


def fetch_model(text: str, key: str) -> Path | None:
    """Download the model that a command-line argument names.

    Args:
        text: The argument: the name of a repository, or a path.
        key: Name of the argument, for error messages.

    Returns:
        The folder of the model; None if the argument is a path.

    Raises:
        UserError: If the model does not exist, cannot be accessed, or cannot be downloaded.
    """
    name = _name_in(text, key)
    if name is None:
        return None
    if name.prefix == MODELSCOPE:
        from omnizoo.hub.modelscope import fetch_from_modelscope

        return Path(fetch_from_modelscope(name, "model", key))
    from omnizoo.hub.repository import resolve

    name = resolve(name, "model", key)
    _download_one(HubReference(key, name, "model", "model"))
    return Path(local_path(str(name)))


def with_values(config: Config, values: Mapping[str, str]) -> Config:
    """Return a copy of a config with new values for some dotted keys. The keys must exist in the config."""
    for key, value in values.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(node: Any, parts: Sequence[str], value: Any) -> Any:
    """Return a copy of a section, list or mapping with a new value for one key inside it.

    Args:
        node: The section, list or mapping.
        parts: The parts of the dotted key.
        value: The new value.
    """
    if not parts:
        return value
    first, *rest = parts
    if isinstance(node, BaseModel):
        return node.model_copy(update={first: _replaced(getattr(node, first), rest, value)})
    if isinstance(node, list):
        return [_replaced(item, rest, value) if i == int(first) else item for i, item in enumerate(node)]
    return {**node, first: _replaced(node[first], rest, value)}


def as_overrides(values: dict[str, str]) -> list[str]:
    """Return command-line arguments that set the values of dotted keys, for the processes of other ranks."""
    return [f"--{key}={json.dumps(value)}" for key, value in values.items()]


def _saved_commits(config: Config) -> dict[tuple[RepoType, str, str | None], str]:
    """Return the commits in the checkpoint that a run resumes from, keyed by (type, repository, revision)."""
    path = _checkpoint_config(config)
    if path is None or not path.is_file():
        return {}
    try:
        saved, _ = parse_yaml(read_text(path), str(path))
    except UserError:
        return {}  # the checkpoint is damaged; loading it will report the error
    if not isinstance(saved, dict):
        return {}
    commits: dict[tuple[RepoType, str, str | None], str] = {}
    for section, content in saved.items():
        repo_type: RepoType = "dataset" if section == "data" else "model"
        for name in pinned_names(content):
            assert name.commit is not None
            commits[repo_type, name.repo, name.revision] = name.commit
    return commits


def _checkpoint_config(config: Config) -> Path | None:
    """Return the path of `config.yaml` in the checkpoint that a run resumes from; None for a new run."""
    request = config.checkpoint.resume
    if request == "never":
        return None
    if request != "auto":
        return Path(request).expanduser() / "config.yaml"
    directory = Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints")
    files = directory.glob("step_*/config.yaml")
    return max(files, key=lambda path: path.parent.name.zfill(40), default=None)
