"""Every private name of transformers that OmniZoo relies on (config/versions.py: checked on which versions).
tests/test_private.py sees them move, and `check_names` when a model is built.

Public ways were tried first: `from_pretrained` cannot fill a model that FSDP2 has already sharded, and builds masks and
buffers that packing must not have.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
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

PACKED = "packed"  # the name of our attention in transformers' interface
# The same, for towers: they attend in one call by a name with "flash" in it, else once per item, whose lengths they
# read from the device. Language models do not get it: some of them pad values for what they take for flash attention.
PACKED_TOWER = "packed_flash"


@cache
def check_names() -> None:
    """Refuse a transformers whose private functions are not those that are called here."""
    loader = PreTrainedModel._load_pretrained_model
    check_signatures(
        "transformers",
        {
            "_load_pretrained_model": (
                loader,
                ("model", "state_dict", "checkpoint_files", "load_config", "expected_keys"),
            ),
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
    """Classes that the model's authors declare indivisible: its blocks. A user's own module may declare them, too."""
    return set(getattr(model, "_no_split_modules", None) or ())


def kept_in_fp32(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the model's authors compute with in fp32 where the rest is in bf16, by name."""
    wanted = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {name: p for name, p in model.named_parameters() if any(part in name for part in wanted)}


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """By its own word; hybrids do not give it, and are known by what the code of their layers calls."""
    codes = (getattr(inspect.unwrap(type(module).forward), "__code__", None) for module in model.modules())
    return bool(model._supports_attention_backend) or (
        carries_state(model) and any(code and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)
    )


def auto_class(config: PretrainedConfig, trust_remote_code: bool) -> Any:
    """transformers' builder of models that write text, for this config; None if there is none. Of a config with parts,
    the builder of the whole: the other one may build its language model alone, and leave the rest of the files."""
    remote = getattr(config, "auto_map", None) or {}
    builders = (AutoModelForCausalLM, AutoModelForMultimodalLM)
    for builder in builders[::-1] if config.sub_configs else builders:
        if type(config) in builder._model_mapping or (trust_remote_code and builder.__name__ in remote):
            return builder
    # Some families that read sound are filed among sequence-to-sequence models only; those that only speak apart.
    for other in (AutoModelForSeq2SeqLM, AutoModelForTextToWaveform):
        if config.sub_configs and type(config) in other._model_mapping and not config.is_encoder_decoder:
            return other
    return None


def loader_of(builder: Any, config: PretrainedConfig) -> Any:
    """Its `from_pretrained`. Where a family has one of its own, that of all models: Qwen2.5-Omni's unpickles a file."""
    known = builder._model_mapping.get(type(config), None)
    kind = known[0] if isinstance(known, tuple) else known
    common = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if kind is None or kind.from_pretrained.__func__ is common:
        return builder.from_pretrained
    return partial(common, kind)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that attends over the tokens of a pack: itself, unless it has others beside it."""
    text = type(model.config.get_text_config())
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel) and type(m.config) is text)


def text_embedding(model: PreTrainedModel) -> nn.Module:
    """The table of the tokenizer's ids. A model may call that of something else its input embedding: then it is the
    one of its own tables that is as large as its config says of the text."""
    found = model.get_input_embeddings()
    rows = getattr(model.config, "text_vocab_size", None)
    tables = [part for part in model.children() if isinstance(part, nn.Embedding) and part.num_embeddings == rows]
    return tables[0] if tables and not isinstance(found, nn.Embedding) else found


def trunk(model: PreTrainedModel) -> nn.Module:
    """What gives the hidden states that the head sees: a part of the model, which need not be the one it names so."""
    if model.base_model is not model:
        return model.base_model
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel) and part.config is model.config)
    return next(parts, model)


def attention_name(model: nn.Module) -> str:
    """A user's own module is taken to attend as it was told to."""
    return str(language_model(model).config._attn_implementation) if isinstance(model, PreTrainedModel) else PACKED


def most_positions(model: nn.Module) -> int | None:
    """How long a sample may be for what the model was trained on, if its config says so."""
    if not isinstance(model, PreTrainedModel):
        return None
    most = getattr(language_model(model).config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def attend_packed(tower: PreTrainedModel) -> None:
    """Let `tower` attend in one call per layer; it hands over the boundaries of its items itself."""
    tower.config._attn_implementation = PACKED_TOWER


def carries_state(model: PreTrainedModel) -> bool:
    """True for recurrent models (state-space and the like)."""
    return bool(model._is_stateful)


@contextmanager
def rules_on_meta() -> Iterator[None]:
    """Let models built on meta apply their rules for initial weights, which transformers leaves out there."""

    def init_weights(self: PreTrainedModel) -> None:
        self.initialize_weights()
        self.tie_weights(recompute_mapping=False)

    current = {name: getattr(nn.init, name) for name in TORCH_INIT_FUNCTIONS if hasattr(nn.init, name)}
    with patch.object(PreTrainedModel, "init_weights", init_weights), patch.dict(TORCH_INIT_FUNCTIONS, current):
        yield


@dataclass(frozen=True)
class Loaded:
    missing: set[str]  # parameters and persistent buffers of the model that the files do not have
    unexpected: set[str]  # keys of the files that the model does not have
    mismatched: dict[str, str]  # by name: "shape in file, shape in model"
    unconverted: dict[str, str] = field(default_factory=dict)  # what cannot be made of the files' weights, and why


def conversion_mapping(model: nn.Module) -> list[Any]:
    """How published keys become the model's own. Ask before `fully_shard`, which renames the classes it looks at."""
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def tied_sources(model: nn.Module) -> dict[str, str]:
    """Of weights with two names, those that `named_parameters` calls by another one than files do, with that."""
    own = {name for name, _ in model.named_parameters()}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {target: source for target, source in tied.items() if target in own and source not in own}


class PublishedKeys:
    """How a model's own weights become those of its published files, as `save_pretrained` writes them. Make it before
    `fully_shard`, which renames the classes that transformers looks at."""

    def __init__(self, model: nn.Module) -> None:
        known = get_model_conversion_mapping(model, add_legacy=False) if isinstance(model, PreTrainedModel) else []
        self.conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
        self.left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self.tied = tied_sources(model)

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """`names` of weights, those together that only make sense together in the files."""
        conversions = [conversion for conversion in self.conversions[::-1] if isinstance(conversion, WeightConverter)]
        converters: list[Any] = [conversion.reverse_transform() for conversion in conversions]
        groups: dict[str, list[str]] = {}
        for name in names:
            if name not in self.left_out:
                groups.setdefault(apply_converters(name, converters)[0], []).append(name)
        return list(groups.values())

    def convert(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A group of weights by their published names."""
        weights = {self.tied.get(name, name): weight for name, weight in weights.items()}
        if not self.conversions:
            return weights
        assert isinstance(model, PreTrainedModel)
        with patch.object(model, "_weight_conversions", self.conversions, create=True):
            converted: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
        return converted


def drop_prefix(files: list[Path], model: PreTrainedModel) -> list[Any]:
    """For a model that is published as part of a larger one: its keys there begin with that part's name."""
    own = set(model.state_dict())
    keys = {key for file in files for key in _keys(file)}
    name = min(own)
    for key in sorted(keys):
        prefix = key.removesuffix(name)
        if key.endswith("." + name) and all(prefix + other in keys for other in own):
            return [WeightRenaming("^" + re.escape(prefix), "")]
    return []


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def load_files(model: PreTrainedModel, files: list[Path], mapping: list[Any], device: torch.device) -> Loaded:
    """Fill `model` (on meta, sharded or not) from safetensors; of a sharded parameter only this rank's part is read,
    unless it takes the whole to convert what is published: one such parameter at a time."""
    load_config = LoadStateDictConfig(device_map={"": device}, weight_mapping=mapping, ignore_mismatched_sizes=True)
    sharded = _made_whole(model, mapping)
    names = names_in_model(model, files, mapping) if sharded else {}
    together: dict[str, list[str]] = {}  # keys of the files, by the parameter that they are the first to become
    for key, name in names.items():
        if name in sharded:
            together.setdefault(name, []).append(key)
    apart = {key for keys in together.values() for key in keys}
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file in files:
            pointer = opened.enter_context(safe_open(file, framework="pt"))
            tensors |= {key: pointer.get_slice(key) for key in pointer.keys()}  # noqa: SIM118 - not a dict
        infos = []
        for keys in together.values():
            own = {key: tensors[key] for key in keys}
            infos.append(convert_and_load_state_dict_in_model(model, own, load_config)[0])
            _shard_again(model, sharded)
        rest = {key: tensor for key, tensor in tensors.items() if key not in apart}
        infos.append(PreTrainedModel._load_pretrained_model(model, rest, None, load_config)[0])
    _shard_again(model, sharded)
    for name, before in sharded.items():  # not in the files, or of another shape there
        _replace(model, name, before)
    info = infos[-1]
    for other in infos[:-1]:
        info.missing_keys &= other.missing_keys
        info.unexpected_keys |= other.unexpected_keys
        info.mismatched_keys |= other.mismatched_keys
        info.conversion_errors |= other.conversion_errors
    if info.error_msgs:
        raise RuntimeError(f"weights could not be converted: {info.error_msgs}")
    # transformers gives a traceback, what was raised, and which step it was.
    reasons = {name: (text.splitlines()[-2:] or [""])[0] for name, text in info.conversion_errors.items()}
    model._adjust_missing_and_unexpected_keys(info)
    tied = set(model.all_tied_weights_keys)
    # transformers compares shards; a user knows the whole shapes.
    shapes = {name: model.get_parameter_or_buffer(name).shape for name, _, _ in info.mismatched_keys}
    published = {name: key for key, name in names_in_model(model, files, mapping).items()} if shapes else {}
    mismatched = {
        name: f"{_shape_in(files, published.get(name, name))} in the files, {tuple(shape)} in the model"
        for name, shape in shapes.items()
    }
    return Loaded(set(info.missing_keys) - tied, set(info.unexpected_keys), mismatched, reasons)


def _made_whole(model: PreTrainedModel, mapping: list[Any]) -> dict[str, Any]:
    """Make sharded parameters whole (on meta) that published ones cannot be converted for in parts; what they were.

    transformers (5.22.2) reads a rank's part of what is published first and converts it then, which gives other rows
    without a word where weights are cut up, joined along the dim that ranks share, or put in another order:
    tests/test_conversions.py.
    """
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    patterns = [(re.compile(pattern), each) for each in converters for pattern in each.target_patterns]
    sharded: dict[str, Any] = {}
    for name, parameter in model.named_parameters() if patterns else ():
        if hasattr(parameter, "placements"):
            targeting = [each for pattern, each in patterns if pattern.search(name)]
            if not all(_converts_in_parts(each, parameter) for each in targeting):
                sharded[name] = parameter
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                _replace(model, name, nn.Parameter(whole, parameter.requires_grad))
    return sharded


def _converts_in_parts(converter: Any, parameter: Any) -> bool:
    """True where converting a rank's part of published weights gives that rank's part of the parameter."""
    axes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    split = {placement.dim for placement, ranks in axes if ranks > 1 and hasattr(placement, "dim")}
    if not split:
        return True
    if not parameter.to_local().numel():
        return False  # transformers cannot stack no experts
    for operation in converter.operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            continue
        if isinstance(operation, Concatenate) and operation.dim not in split:
            continue
        return False
    return True


def _shard_again(model: PreTrainedModel, sharded: dict[str, Any]) -> None:
    """Keep this rank's part of each of `sharded` that has been loaded whole, and take it out of them."""
    for name in [name for name in sharded if not model.get_parameter(name).is_meta]:
        loaded, before = model.get_parameter(name), sharded.pop(name)
        part = DtensorShardOperation(before).shard_tensor(loaded.data, device=loaded.device, dtype=loaded.dtype)
        assert part is not None, name
        filled = nn.Parameter(_dtensor_from_local_like(part.clone(), before), before.requires_grad)
        filled._is_hf_initialized = True  # type: ignore[attr-defined]
        _replace(model, name, filled)


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def names_in_model(model: PreTrainedModel, files: list[Path], mapping: list[Any]) -> dict[str, str]:
    """What the keys of published files are called in `model`."""
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    own, prefix = model.state_dict(), model.base_model_prefix
    names = {}
    for key in (key for file in files for key in _keys(file)):
        names[key] = rename_source_key(key, renamings, converters, prefix, own)[0]
        if names[key] not in own and key in own:  # files may have the model's own names already
            names[key] = rename_source_key(key, [], [], prefix, own)[0]
    return names


def _shape_in(files: list[Path], name: str) -> str:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - not a dict
                return str(tuple(tensors.get_slice(name).get_shape()))
    return "another shape"


def retie(model: PreTrainedModel) -> None:
    """Make tied weights one parameter again after loading has replaced their source."""
    for target, source in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(source))


def is_experts(module: nn.Module) -> bool:
    """True for a module that holds all experts of a layer behind transformers' experts interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "num_experts")


def register_experts(name: str, forward: Callable[..., torch.Tensor]) -> None:
    """Make `forward(module, hidden, index, weights)` a choice of `set_experts_implementation`."""
    ALL_EXPERTS_FUNCTIONS.register(name, forward)


def expert_activation(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What an expert does between its two matmuls."""
    activate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return activate


def routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """Router modules by name, each with the place of the logits in what it returns."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for prefix, part in model.named_modules():
        declared = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in declared if isinstance(declared, list) else [declared]:
            for name, module in part.named_modules(prefix=prefix):
                if recorder.target_class is not None and isinstance(module, recorder.target_class):
                    found[name] = module, recorder.index
    return found
