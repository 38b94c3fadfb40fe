"""Load published weights into a model on meta: find the safetensors, load them, and check that no key is left over."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError, first_line, is_out_of_memory
from omnizoo.config.hub import local_path
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import Port
from omnizoo.models.adapters.lora import attached
from omnizoo.models.diffusion.denoiser import read_denoiser
from omnizoo.models.diffusion.pipeline_folder import DIFFUSERS_STEM
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.export_files import keep_export_files, read_published
from omnizoo.models.hf_private import (
    Loaded,
    auto_class,
    conversion_mapping,
    drop_prefix,
    has_score_head,
    load_files,
    load_unconverted,
    loader_of,
    retie,
)
from omnizoo.models.interfaces.score_head import replaced_weights
from omnizoo.models.media.media_model import MediaModel
from omnizoo.models.read_config import read_model_config
from omnizoo.models.recipe import store_recipe
from omnizoo.models.untrusted_folders import list_names, open_weights, read_json, tensor_names, weight_files
from omnizoo.models.weights.vocabulary import PublishedRows, may_grow, rows_of_files
from omnizoo.models.wrapper_models import use_inner_forward


@dataclass(frozen=True)
class WeightSource:
    """Published weights of a model, or of one Hugging Face model inside it."""

    module: str  # path of the submodule; empty for the complete model
    path: str
    key: str  # config key of the path, for messages
    mapping: list[Any]  # conversions from published keys to the model's names
    stem: str = "model"  # name of the safetensors file, without suffix

    @property
    def prefix(self) -> str:
        """Prefix of the submodule's parameter names in the complete model."""
        return self.module and f"{self.module}."

    def files(self) -> list[Path]:
        """Return the paths of the safetensors files."""
        return weight_files(Path(self.path), self.key, self.stem)


def weight_origins(model: nn.Module, media: MediaModel, spec: ModelSection) -> list[WeightSource]:
    """Return the sources of the weights of `model`. Must be called before the model is sharded."""
    if denoiser_recipe(model) is not None:
        return _denoiser_sources(spec)
    paths = {"": ("model.path", spec.path)}
    names = {id(module): name for name, module in model.named_modules()}
    if spec.foundation is not None:
        paths = {names[id(media.language)]: ("model.foundation.path", spec.foundation.path)}
    modalities = media.modalities(spec)
    for name, role in media.ports:
        settings = getattr(spec.modalities.get(name), role, None)
        if settings is not None and settings.path is not None:
            inner = find_module(modalities, Port(name, role)).pretrained
            if inner is not None:  # components without an inner model read their folder themselves
                paths[names[id(inner)]] = (f"model.modalities.{name}.{role}.path", settings.path)

    sources = []
    for name, (key, path) in paths.items():
        if path is None:
            continue
        module: Any = model.get_submodule(name)
        source = WeightSource(module=name, path=local_path(path), key=key, mapping=conversion_mapping(module))
        if key.startswith("model.modalities"):
            with open_weights(source.files()) as weights:
                source.mapping.extend(drop_prefix(weights, module))
        sources.append(source)
    return sources


def _denoiser_sources(spec: ModelSection) -> list[WeightSource]:
    """Return the source of each transformer of a denoiser."""
    source = read_denoiser(spec)
    sources = []
    for name, folder in source.folders.items():
        path = name if source.is_pair else ""
        sources.append(WeightSource(module=path, path=str(folder), key=source.key, mapping=[], stem=DIFFUSERS_STEM))
    return sources


def load_weights(
    model: nn.Module, source: WeightSource, spec: ModelSection, device: torch.device, new: Collection[str]
) -> set[str]:
    """Fill `model` from `source`.

    A component may be published as part of a larger model. Other weights in its folder are ignored.

    Args:
        model: The module to fill, on meta; sharded or not.
        source: The published weights.
        spec: The section `model` of the config.
        device: The device of the loaded shards.
        new: Weights that exist only in this run and in no folder: adapter matrices and a resized vocabulary.

    Returns:
        The names of weights that the files lack. Each of them is allowed by `spec.allow_missing` or `new`.
    """
    if denoiser_recipe(model) is not None:
        loaded = load_unconverted(model, source.files(), device)
        _check_loaded(loaded, source, spec, new)
        return loaded.missing
    assert isinstance(model, PreTrainedModel)
    _check_not_quantized(model.config, f"{source.key}: {source.path}")
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    loaded = load_files(model, source.files(), source.mapping, device)
    retie(model)
    for name, parameter in model.named_parameters():  # loading replaced the parameters of frozen tokenizers
        parameter.requires_grad_(is_trained[name])

    _check_loaded(loaded, source, spec, new)
    return loaded.missing


def _check_loaded(loaded: Loaded, source: WeightSource, spec: ModelSection, new: Collection[str]) -> None:
    """Raise a `UserError` if the files lack a weight or have an unknown key, unless the config allows it."""
    path = source.path
    key = source.key
    allow_missing, allow_unexpected = spec.allow_missing, spec.allow_unexpected
    if spec.score_head is not None:
        new_head, old_head = replaced_weights(read_json(Path(path) / "config.json"))
        allow_missing = [*allow_missing, *new_head]
        allow_unexpected = [*allow_unexpected, *old_head]
    missing = sorted(name for name in loaded.missing.difference(new) if not _allowed(name, allow_missing))
    unexpected = sorted(name for name in loaded.unexpected if not _allowed(name, allow_unexpected))
    mismatched = sorted(f"{name}: {shapes}" for name, shapes in loaded.mismatched.items() if name not in new)
    unknown = f" The files also have weights that the model lacks: {list_names(unexpected)}." if unexpected else ""

    if loaded.unconverted:
        name, reason = min(loaded.unconverted.items())
        raise UserError(f"{key}: {path}: the weights in the files cannot be converted to {name}: {reason}.{unknown}")
    if mismatched:
        raise UserError(f"{key}: {path}: the shapes of weights do not match config.json: {list_names(mismatched)}")
    if missing:
        raise UserError(
            f"{key}: {path}: the files lack weights of the model: {list_names(missing)}. "
            f"Add them to model.allow_missing to initialize them randomly.{unknown}"
        )
    if unexpected and not key.startswith("model.modalities"):
        raise UserError(
            f"{key}: {path}: the files have weights that the model lacks: {list_names(unexpected)}. "
            "Add them to model.allow_unexpected to ignore them."
        )


def _check_not_quantized(config: PretrainedConfig, folder: str) -> None:
    """Raise a `UserError` if the published weights are quantized. `folder` may start with a key."""
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"{folder}/config.json: the file contains a quantization_config, but quantized weights are not supported. "
            "Use a folder with floating-point weights."
        )


def grown_rows(model: nn.Module, sources: Iterable[WeightSource], spec: ModelSection) -> dict[str, PublishedRows]:
    """Return the published rows of the weights with a resized vocabulary, keyed by name in `model`."""
    grown: dict[str, PublishedRows] = {}
    for source in sources if may_grow(spec) else ():
        module: Any = model.get_submodule(source.module)
        rows_by_name = rows_of_files(module, source.files(), source.mapping)
        grown |= {source.prefix + name: rows for name, rows in rows_by_name.items()}
    return grown


def load_whole(spec: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """Load the unsharded model from the folder `spec.path` on the CPU. Missing or unknown weights are an error."""
    assert spec.path is not None
    folder = Path(local_path(spec.path))
    config = read_model_config(spec)
    if has_score_head(config):
        raise UserError(f"{folder}: contains a sequence classification model, which generates no text")
    builder = auto_class(config, spec.trust_remote_code)
    if builder is None:
        raise UserError(
            f"{folder}: transformers has no text-generating model of type `{config.model_type}`. Use another model."
        )
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder}: contains an adapter (adapter_config.json), which this command does not read. "
            "Merge the adapter into its base model."
        )
    num_tensors = sum(len(tensor_names(file)) for file in weight_files(folder, "weights"))
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > num_tensors:  # building that many layers would take too long
        raise UserError(
            f"{folder}: config.json declares {num_layers} layers, but the files have only {num_tensors} weights"
        )
    _check_not_quantized(config, f"{folder}")

    try:
        model, info = loader_of(builder, config)(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=spec.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except Exception as error:  # constructors and loaders raise exceptions of any type if sizes are inconsistent
        if is_out_of_memory(error):
            raise
        raise UserError(f"{folder}: cannot build the model that config.json describes: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)

    problems = {
        "missing": "the files lack weights of the model that config.json describes",
        "unexpected": "the files have weights that the model of config.json lacks",
        "mismatched": "the shapes of weights do not match config.json",
    }
    for kind, problem in problems.items():
        keys = sorted(str(key) for key in info[f"{kind}_keys"])
        if keys:
            raise UserError(f"{folder}: {problem}: {list_names(keys)}")

    use_inner_forward(model)
    store_recipe(model, spec)
    keep_export_files(model, read_published(folder, config, has_weights=True))
    return model


def _allowed(name: str, patterns: list[str]) -> bool:
    """Whether `name` matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def load_published(
    model: nn.Module,
    sources: Iterable[WeightSource],
    spec: ModelSection,
    device: torch.device,
    wanted: set[str],
    grown: Collection[str] = (),
) -> set[str]:
    """Fill `model` from all folders with published weights.

    Returns:
        The names in `wanted` that the folders lack, and all names in `grown`.
    """
    adapter = attached(model)
    unpublished = set(grown)
    if adapter is not None:
        unpublished |= adapter.started
    for source in sources:
        module = model.get_submodule(source.module)
        prefix = source.prefix
        new = {name.removeprefix(prefix) for name in unpublished if name.startswith(prefix)}
        missing = load_weights(module, source, spec, device, new)

        loaded = {prefix + name for name, _ in module.named_parameters()}
        loaded |= {prefix + name for name in module.state_dict()}
        wanted = (wanted - loaded) | {prefix + name for name in missing}
    return wanted.union(grown)
