"""Load published weights into a model on meta: find the safetensors, load them, and account for every key."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError, first_line, is_out_of_memory
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import find_module
from omnizoo.modalities.item import Port
from omnizoo.models.adapters.lora import attached
from omnizoo.models.export_files import keep_export_files, read_published
from omnizoo.models.hf_private import (
    auto_class,
    conversion_mapping,
    drop_prefix,
    load_files,
    loader_of,
    retie,
)
from omnizoo.models.media.media_model import MediaModel
from omnizoo.models.read_config import read_model_config
from omnizoo.models.untrusted_folders import inside, open_weights, read_json, tensor_names
from omnizoo.models.weights.vocabulary import PublishedRows, may_grow, rows_of_files
from omnizoo.models.wrapper_models import use_inner_forward


@dataclass(frozen=True)
class WeightSource:
    """Published weights of a model, or of one Hugging Face model inside it."""

    module: str  # path of the submodule; "": the complete model
    path: str
    key: str  # config key of the path, for messages
    mapping: list[Any]  # conversions from published keys to the model's names

    @property
    def prefix(self) -> str:
        """Prefix of the submodule's parameter names in the complete model."""
        return self.module and f"{self.module}."

    def files(self) -> list[Path]:
        """Return the paths of the safetensors files."""
        return weight_files(Path(self.path), self.key)


def weight_origins(model: nn.Module, media: MediaModel, spec: ModelSection) -> list[WeightSource]:
    """Return the sources of the weights of `model`. Must be called before the model is sharded."""
    paths = {"": ("model.path", spec.path)}
    names = {id(module): name for name, module in model.named_modules()}
    if spec.foundation is not None:
        paths = {names[id(media.language)]: ("model.foundation.path", spec.foundation.path)}
    modalities = media.modalities(spec)
    for name, role in media.ports:
        part = getattr(spec.modalities.get(name), role, None)
        if part is not None and part.path is not None:
            inner = find_module(modalities, Port(name, role)).pretrained
            if inner is not None:  # other components read their folder themselves
                paths[names[id(inner)]] = (f"model.modalities.{name}.{role}.path", part.path)
    origins = []
    for name, (key, path) in paths.items():
        if path is not None:
            owner: Any = model.get_submodule(name)
            origin = WeightSource(name, path, key, conversion_mapping(owner))
            if key.startswith("model.modalities"):
                with open_weights(origin.files()) as weights:
                    origin.mapping.extend(drop_prefix(weights, owner))
            origins.append(origin)
    return origins


def load_weights(
    model: nn.Module, origin: WeightSource, spec: ModelSection, device: torch.device, new: Collection[str]
) -> set[str]:
    """Fill `model` from `origin`.

    A component may be published as part of a larger model. Other weights in its folder are ignored.

    Args:
        model: The module to fill, on meta; sharded or not.
        origin: The published weights.
        spec: The section `model` of the config.
        device: The device of the loaded shards.
        new: Weights that are specific to the run and in no folder: adapter matrices and a resized vocabulary.

    Returns:
        The names that the files lack. `spec.allow_missing` or `new` contains all of them.
    """
    assert isinstance(model, PreTrainedModel)
    path, key = origin.path, origin.key
    _refuse_quantized(model.config, f"{key}: {path}")
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    loaded = load_files(model, origin.files(), origin.mapping, device)
    retie(model)
    for name, parameter in model.named_parameters():  # loading replaces unsharded parameters (frozen tokenizers)
        parameter.requires_grad_(is_trained[name])
    missing = sorted(name for name in loaded.missing.difference(new) if not _allowed(name, spec.allow_missing))
    unexpected = sorted(name for name in loaded.unexpected if not _allowed(name, spec.allow_unexpected))
    mismatched = sorted(f"{name}: {shapes}" for name, shapes in loaded.mismatched.items() if name not in new)
    unknown = f"; the files have what the model does not know: {_some(unexpected)}" if unexpected else ""
    if loaded.unconverted:
        name, reason = min(loaded.unconverted.items())
        raise UserError(f"{key}: {path}: {name} cannot be made of the weights in the files: {reason}{unknown}")
    if mismatched:
        raise UserError(f"{key}: {path} does not fit its own config.json: {_some(mismatched)}")
    if missing:
        raise UserError(
            f"{key}: {path} lacks weights of the model: {_some(missing)}; "
            f"name them in model.allow_missing to have them initialised{unknown}"
        )
    if unexpected and not origin.key.startswith("model.modalities"):
        raise UserError(
            f"{key}: {path} has weights the model does not know: {_some(unexpected)}; "
            "name them in model.allow_unexpected to ignore them"
        )
    return loaded.missing


def _refuse_quantized(config: PretrainedConfig, where: str) -> None:
    """Raise a `UserError` if the published weights are quantized."""
    if getattr(config, "quantization_config", None):
        raise UserError(f"{where}/config.json has a quantization_config; quantized weights cannot be read")


def grown_rows(model: nn.Module, origins: Iterable[WeightSource], spec: ModelSection) -> dict[str, PublishedRows]:
    """Return the weights of a resized vocabulary, by name in `model`, with their published rows."""
    grown: dict[str, PublishedRows] = {}
    for origin in origins if may_grow(spec) else ():
        part: Any = model.get_submodule(origin.module)
        found = rows_of_files(part, origin.files(), origin.mapping)
        grown |= {origin.prefix + name: rows for name, rows in found.items()}
    return grown


def load_whole(spec: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """Load the unsharded model of the folder `spec.path` on the CPU, and account for every weight."""
    assert spec.path is not None
    folder = Path(spec.path)
    config = read_model_config(spec)
    builder = auto_class(config, spec.trust_remote_code)
    if builder is None:
        raise UserError(f"{folder}: transformers has no model of type `{config.model_type}` that writes text")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds an adapter (adapter_config.json), which is not read; merge it into its model")
    tensors = sum(len(tensor_names(file)) for file in weight_files(folder, "its weights"))
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > tensors:  # building that many layers would take forever
        raise UserError(f"{folder}: config.json says {layers} layers, but the files hold {tensors} weights")
    _refuse_quantized(config, f"{folder}")
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
    except Exception as error:  # constructors and loaders raise any exception for sizes that do not fit
        if is_out_of_memory(error):
            raise
        raise UserError(f"{folder}: the model cannot be built as config.json says: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    for kind in ("missing", "unexpected", "mismatched"):
        if keys := sorted(str(key) for key in info[f"{kind}_keys"]):
            what = {"missing": "lacks", "unexpected": "has unknown", "mismatched": "has other shapes of"}[kind]
            raise UserError(f"{folder} {what} weights of the model that its config.json describes: {_some(keys)}")
    use_inner_forward(model)
    keep_export_files(model, read_published(folder, config, has_weights=True))
    return model


def weight_files(folder: Path, key: str) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder: those in its index, if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{key}: {index} has no weight_map: a mapping of weights to files")
        files = sorted({inside(folder, name, f"{key}: {index}") for name in places.values()})
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{key}: {folder} has no {_some(absent)}; weights are read from safetensors only (never from pickles)"
        )
    for file in files:
        tensor_names(file)
    return files


def _allowed(name: str, patterns: list[str]) -> bool:
    """Whether `name` matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    """Return the first three names and the number of the others, for messages."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_published(
    model: nn.Module,
    origins: Iterable[WeightSource],
    spec: ModelSection,
    device: torch.device,
    wanted: set[str],
    grown: Collection[str] = (),
) -> set[str]:
    """Fill `model` from all folders with published weights.

    Returns:
        The names of `wanted` that the folders lack, and all names of `grown`.
    """
    adapter = attached(model)
    unpublished = {*grown, *(adapter.started if adapter else ())}
    for origin in origins:
        part, prefix = model.get_submodule(origin.module), origin.prefix
        new = {name.removeprefix(prefix) for name in unpublished if name.startswith(prefix)}
        missing = load_weights(part, origin, spec, device, new)
        own = {prefix + name for name, _ in part.named_parameters()} | {prefix + name for name in part.state_dict()}
        wanted = (wanted - own) | {prefix + name for name in missing}
    return wanted.union(grown)
