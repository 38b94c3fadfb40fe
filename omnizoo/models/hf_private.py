"""All private names of transformers that OmniZoo uses (checked versions: config/versions.py).

If one of them changes, tests/test_private_names.py fails, and so does `check_names` when a model is built. Public
functions are not sufficient: `from_pretrained` cannot fill a model that FSDP2 has sharded, and it builds masks and
buffers that break packing.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextToWaveform,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.distributed.sharding_utils import DtensorShardOperation, _dtensor_from_local_like
from transformers.initialization import TORCH_INIT_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import LoadStateDictConfig

from omnizoo.config.versions import check_signatures
from omnizoo.models.diffusion.recipe import denoiser_recipe, parts_in_fp32
from omnizoo.models.untrusted_folders import open_weights

PACKED = "packed"  # name of our attention in transformers' attention interface
# Name of the same attention for encoders. If the name contains "flash", encoders compute the attention of all items in
# one call. Otherwise, they make one call per item and read its length from the device. Language models do not use this
# name, because some of them would pad the values.
PACKED_TOWER = "packed_flash"
SEQUENCE_CLASSIFICATION = "ForSequenceClassification"  # end of the names of classes with a score head


@cache
def check_names() -> None:
    """Check that the private functions of transformers have the signatures that this file expects."""
    check_signatures(
        "transformers",
        {
            "_adjust_missing_and_unexpected_keys": (
                PreTrainedModel._adjust_missing_and_unexpected_keys,
                ("self", "loading_info"),
            ),
            "convert_and_load_state_dict_in_model": (
                convert_and_load_state_dict_in_model,
                ("model", "state_dict", "load_config"),
            ),
            "init_weights": (PreTrainedModel.init_weights, ("self",)),
            "initialize_weights": (PreTrainedModel.initialize_weights, ("self",)),
            "get_model_conversion_mapping": (get_model_conversion_mapping, ("model",)),
        },
    )


def block_class_names(model: nn.Module) -> set[str]:
    """Return the class names of the model's blocks (`_no_split_modules`). User modules may declare them, too."""
    return set(getattr(model, "_no_split_modules", None) or ())


def count_owners(model: nn.Module) -> Counter[int]:
    """Return the number of modules that own each parameter, keyed by its id. Tied parameters have several owners."""
    return Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))


def kept_in_fp32(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, keyed by name, that the model's authors keep in fp32 in a bf16 run."""
    if denoiser_recipe(model) is not None:
        return parts_in_fp32(model)
    fragments = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {name: p for name, p in model.named_parameters() if any(fragment in name for fragment in fragments)}


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether the model uses transformers' attention interface.

    Hybrid models do not declare it, so the code of their layers is searched for the call.
    """
    if model._supports_attention_backend:
        return True
    if not carries_state(model):
        return False
    codes = (getattr(inspect.unwrap(type(module).forward), "__code__", None) for module in model.modules())
    return any(code and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def has_score_head(config: PretrainedConfig) -> bool:
    """Whether a config describes a sequence classification model."""
    return any(str(name).endswith(SEQUENCE_CLASSIFICATION) for name in config.architectures or ())


def classification_class(config: PretrainedConfig) -> Any:
    """Return transformers' class of sequence classification models for this config, or None."""
    return AutoModelForSequenceClassification._model_mapping.get(type(config), None)


def auto_class(config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """Return transformers' auto class for this config, or None.

    It builds a sequence classification model if the config describes one, otherwise a model that generates text. For a
    config with sub-configs, prefer the multimodal auto class: the causal one may build only the language model
    and ignore the other weights.
    """
    if has_score_head(config):
        return AutoModelForSequenceClassification if classification_class(config) is not None else None
    remote = getattr(config, "auto_map", None) or {}
    builders = (AutoModelForCausalLM, AutoModelForMultimodalLM)
    for builder in builders[::-1] if config.sub_configs else builders:
        if type(config) in builder._model_mapping or (trust_remote_code and builder.__name__ in remote):
            return builder
    # transformers registers some audio-input families only as sequence-to-sequence models, and speech-only families
    # only as text-to-waveform models.
    for other in (AutoModelForSeq2SeqLM, AutoModelForTextToWaveform):
        if config.sub_configs and type(config) in other._model_mapping and not config.is_encoder_decoder:
            return other
    return None


def loader_of(builder: Any, config: PretrainedConfig) -> Any:
    """Return the `from_pretrained` of the config's class.

    If the family overrides it, return the common implementation instead: Qwen2.5-Omni's version unpickles a file.
    """
    classes = builder._model_mapping.get(type(config), None)
    model_class = classes[0] if isinstance(classes, tuple) else classes
    common = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if model_class is None or model_class.from_pretrained.__func__ is common:
        return builder.from_pretrained
    return partial(common, model_class)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the submodule that processes the tokens of a pack: `model` itself if it has no other components."""
    text = type(model.config.get_text_config())
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel) and type(m.config) is text)


def text_embedding(model: PreTrainedModel) -> nn.Module:
    """Return the embedding of the tokenizer's ids.

    The input embedding of some models belongs to another vocabulary. For such models, return the child table with
    `text_vocab_size` rows.
    """
    embedding = model.get_input_embeddings()
    rows = getattr(model.config, "text_vocab_size", None)
    tables = [child for child in model.children() if isinstance(child, nn.Embedding) and child.num_embeddings == rows]
    if tables and not isinstance(embedding, nn.Embedding):
        return tables[0]
    return embedding


def trunk(model: PreTrainedModel) -> nn.Module:
    """Return the module that produces the hidden states for the head. It may differ from `base_model`."""
    if model.base_model is not model:
        return model.base_model
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel) and part.config is model.config)
    return next(parts, model)


def attention_name(model: nn.Module) -> str:
    """Return the attention implementation of a model. A user module is assumed to use packed attention."""
    if not isinstance(model, PreTrainedModel):
        return PACKED
    return str(language_model(model).config._attn_implementation)


def most_positions(model: nn.Module) -> int | None:
    """Return the longest sample that the model was trained for, or None if its config does not contain it."""
    if not isinstance(model, PreTrainedModel):
        return None
    max_positions = getattr(language_model(model).config, "max_position_embeddings", None)
    return max_positions if isinstance(max_positions, int) and max_positions > 0 else None


def attend_packed(tower: PreTrainedModel) -> None:
    """Make `tower` compute attention with one call per layer. The encoder passes the boundaries of its items."""
    tower.config._attn_implementation = PACKED_TOWER


def carries_state(model: PreTrainedModel) -> bool:
    """Whether the model has recurrent layers, such as state-space layers."""
    return bool(model._is_stateful)


@contextmanager
def rules_on_meta() -> Iterator[None]:
    """Context manager in which models on meta run their weight initialization. By default, transformers skips it."""

    def init_weights(self: PreTrainedModel) -> None:
        self.initialize_weights()
        self.tie_weights(recompute_mapping=False)

    current = {name: getattr(nn.init, name) for name in TORCH_INIT_FUNCTIONS if hasattr(nn.init, name)}
    with patch.object(PreTrainedModel, "init_weights", init_weights), patch.dict(TORCH_INIT_FUNCTIONS, current):
        yield


@dataclass(frozen=True)
class Loaded:
    """Result of loading weights from files."""

    missing: set[str]  # parameters and persistent buffers of the model that the files lack
    unexpected: set[str]  # keys of the files that the model lacks
    mismatched: dict[str, str]  # name -> "shape in file, shape in model"
    unconverted: dict[str, str] = field(default_factory=dict)  # weights that cannot be converted -> reason


def conversion_mapping(model: nn.Module) -> list[Any]:
    """Return the conversions from published keys to the model's names.

    Must be called before `fully_shard`, because it renames the classes that transformers looks up.
    """
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def tied_sources(model: nn.Module) -> dict[str, str]:
    """Return tied weights that have different names in published files and in `named_parameters`.

    Returns:
        The names in published files, keyed by the name in `named_parameters`.
    """
    names = {name for name, _ in model.named_parameters()}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {target: source for target, source in tied.items() if target in names and source not in names}


class PublishedKeys:
    """Conversion of a model's weights to published names and shapes, as `save_pretrained` writes them.

    Must be created before `fully_shard`, because it renames the classes that transformers looks up.
    """

    def __init__(self, model: nn.Module) -> None:
        mapping: list[Any] = []
        if isinstance(model, PreTrainedModel):
            mapping = get_model_conversion_mapping(model, add_legacy=False)
        self.conversions = [conversion for conversion in mapping if not isinstance(conversion, PrefixChange)]
        self.left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self.tied = tied_sources(model)

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Divide `names` into groups of weights that must be converted together."""
        conversions = [conversion for conversion in self.conversions[::-1] if isinstance(conversion, WeightConverter)]
        converters: list[Any] = [conversion.reverse_transform() for conversion in conversions]
        groups: dict[str, list[str]] = {}
        for name in names:
            if name not in self.left_out:
                groups.setdefault(apply_converters(name, converters)[0], []).append(name)
        return list(groups.values())

    def convert(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a group of weights under their published names."""
        weights = {self.tied.get(name, name): weight for name, weight in weights.items()}
        if not self.conversions:
            return weights
        assert isinstance(model, PreTrainedModel)
        with patch.object(model, "_weight_conversions", self.conversions, create=True):
            converted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
        return converted


def drop_prefix(keys: Collection[str], model: PreTrainedModel) -> list[Any]:
    """Return a renaming that removes a key prefix, for a model whose files belong to a larger model."""
    names = set(model.state_dict())
    first_name = min(names)
    for key in sorted(keys):
        prefix = key.removesuffix(first_name)
        if key.endswith("." + first_name) and all(prefix + name in keys for name in names):
            return [WeightRenaming("^" + re.escape(prefix), "")]
    return []


def load_files(model: PreTrainedModel, files: list[Path], mapping: list[Any], device: torch.device) -> Loaded:
    """Fill `model` (on meta, sharded or not) from safetensors.

    Each rank reads only its local shard of a parameter. Parameters that cannot be converted shard by shard are read in
    full, one at a time.
    """
    load_config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping, ignore_mismatched_sizes=True)
    sharded = _replace_by_full(model, mapping)
    with open_weights(files) as weights:
        names = names_in_model(model, weights, mapping)
        shapes = {names[key]: tuple(weight.get_shape()) for key, weight in weights.items()}
        by_parameter: dict[str, dict[str, Any]] = {name: {} for name in sharded}
        others: dict[str, Any] = {}
        for key, weight in weights.items():
            by_parameter.get(names[key], others)[key] = weight
        infos = []
        for group in (*by_parameter.values(), others):
            infos.append(convert_and_load_state_dict_in_model(model, group, load_config)[0])
            _shard_again(model, sharded)
    for name, shard in sharded.items():  # the files lack these parameters or store them with a different shape
        _replace(model, name, shard)

    info = infos[-1]
    for other in infos[:-1]:
        info.missing_keys &= other.missing_keys
        info.unexpected_keys |= other.unexpected_keys
        info.mismatched_keys |= other.mismatched_keys
        info.conversion_errors |= other.conversion_errors
    if info.error_msgs:
        raise RuntimeError(f"weights could not be converted: {info.error_msgs}")

    # transformers' message consists of a traceback, the exception and the conversion step. Keep only the exception.
    reasons = {name: (text.splitlines()[-2:] or [""])[0] for name, text in info.conversion_errors.items()}
    model._adjust_missing_and_unexpected_keys(info)
    # transformers compares local shards; the message reports full shapes.
    mismatched = {}
    for name, _, _ in info.mismatched_keys:
        model_shape = tuple(model.get_parameter_or_buffer(name).shape)
        mismatched[name] = f"{shapes.get(name, 'another shape')} in the files, {model_shape} in the model"
    return Loaded(
        missing=set(info.missing_keys) - set(model.all_tied_weights_keys),
        unexpected=set(info.unexpected_keys),
        mismatched=mismatched,
        unconverted=reasons,
    )


def load_unconverted(model: nn.Module, files: list[Path], device: torch.device) -> Loaded:
    """Fill `model` (on meta, sharded or not) from safetensors that have its names and shapes.

    Each rank reads only its local shards.
    """
    persistent = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    targets: dict[str, Any] = dict(model.named_parameters()) | persistent
    unexpected: set[str] = set()
    mismatched: dict[str, str] = {}
    with open_weights(files) as weights:
        for name, weight in weights.items():
            if name not in targets:
                unexpected.add(name)
                continue
            target = targets.pop(name)
            shape = tuple(weight.get_shape())
            if shape != tuple(target.shape):
                mismatched[name] = f"{shape} in the files, {tuple(target.shape)} in the model"
                continue
            if hasattr(target, "placements"):
                shard = DtensorShardOperation(target).shard_tensor(weight, device=device, dtype=target.dtype)
                assert shard is not None, name
                loaded = _dtensor_from_local_like(shard.clone(), target)
            else:
                loaded = weight[...].to(device, target.dtype, copy=True)
            is_parameter = isinstance(target, nn.Parameter)
            _replace(model, name, nn.Parameter(loaded, target.requires_grad) if is_parameter else loaded)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = {name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)}
    return Loaded(missing=set(targets), unexpected=unexpected, mismatched=mismatched)


def _replace_by_full(model: PreTrainedModel, mapping: list[Any]) -> dict[str, Any]:
    """Replace sharded parameters with full parameters on meta if they cannot be converted shard by shard.

    transformers (5.22.2) reads a rank's shard of the published weights and then converts it. The result is silently
    wrong if weights are split, concatenated along the sharded dim, or permuted (see
    tests/models/weights/test_conversions.py).

    Returns:
        The original sharded parameters, keyed by name.
    """
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    patterns = [(re.compile(pattern), converter) for converter in converters for pattern in converter.target_patterns]
    sharded: dict[str, Any] = {}
    for name, parameter in model.named_parameters() if patterns else ():
        if hasattr(parameter, "placements"):
            applied = [converter for pattern, converter in patterns if pattern.search(name)]
            if not all(_converts_by_shard(converter, parameter) for converter in applied):
                sharded[name] = parameter
                full = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                _replace(model, name, nn.Parameter(full, parameter.requires_grad))
    return sharded


def _converts_by_shard(converter: Any, parameter: Any) -> bool:
    """Whether converting a rank's shard of the published weights gives that rank's shard of the parameter."""
    axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    split_dims = {placement.dim for placement, ranks in axes if ranks > 1 and hasattr(placement, "dim")}
    if not split_dims:
        return True
    if not parameter.to_local().numel():
        return False  # transformers cannot stack zero experts
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            continue
        if isinstance(operation, Concatenate) and operation.dim not in split_dims:
            continue
        return False
    return True


def _shard_again(model: PreTrainedModel, sharded: dict[str, Any]) -> None:
    """Replace parameters that were loaded in full with this rank's local shards, and remove them from `sharded`."""
    for name in [name for name in sharded if not model.get_parameter(name).is_meta]:
        loaded = model.get_parameter(name)
        original = sharded.pop(name)
        shard = DtensorShardOperation(original).shard_tensor(loaded.data, device=loaded.device, dtype=loaded.dtype)
        assert shard is not None, name
        filled = nn.Parameter(_dtensor_from_local_like(shard.clone(), original), original.requires_grad)
        filled._is_hf_initialized = True  # type: ignore[attr-defined]
        _replace(model, name, filled)


def _replace(model: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Replace the parameter or buffer `name` of `model`."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def names_in_model(model: PreTrainedModel, keys: Iterable[str], mapping: list[Any]) -> dict[str, str]:
    """Return the name in `model` of each key of published files."""
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for key in keys:
        names[key] = rename_source_key(key, renamings, converters, prefix, state)[0]
        if names[key] not in state and key in state:  # files may already use the model's names
            names[key] = rename_source_key(key, [], [], prefix, state)[0]
    return names


def retie(model: PreTrainedModel) -> None:
    """Tie weights again after loading has replaced their source."""
    for target, source in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source))


def is_experts(module: nn.Module) -> bool:
    """Whether a module contains all experts of a layer and uses transformers' experts interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "num_experts")


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules that contain all experts of a layer, keyed by name. Empty for a dense model."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def register_experts(name: str, forward: Callable[..., torch.Tensor]) -> None:
    """Register `forward(module, hidden, index, weights)` as an option of `set_experts_implementation`."""
    ALL_EXPERTS_FUNCTIONS.register(name, forward)


def expert_activation(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation function between the two matmuls of an expert."""
    activate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return activate


def routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Return the router modules, keyed by name, each with the index of the logits in its output."""
    by_name: dict[str, tuple[nn.Module, int]] = {}
    for prefix, parent in model.named_modules():
        declared = (getattr(parent, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders = declared if isinstance(declared, list) else [declared]
        for recorder in recorders:
            for name, module in parent.named_modules(prefix=prefix):
                if recorder.target_class is not None and isinstance(module, recorder.target_class):
                    by_name[name] = module, recorder.index
    return by_name
