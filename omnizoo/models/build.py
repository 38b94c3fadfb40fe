"""Config -> module on meta: no weights, no memory, the untouched class that transformers ships, or several composed."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from omnizoo.config.doors import resolve
from omnizoo.config.errors import UserError
from omnizoo.config.hub import hub_hint
from omnizoo.config.model_section import EncoderPart, Modality, Model, Projector
from omnizoo.config.section import Given, Part
from omnizoo.modalities.build import BUILDING_ERRORS, explain
from omnizoo.modalities.frozen import tokenisers
from omnizoo.models.adapter import attach
from omnizoo.models.adapter_files import adapter_settings, check_base, check_shapes
from omnizoo.models.artefact import check_settings, read_json
from omnizoo.models.attention import carry_pack
from omnizoo.models.config_fields import check_numbers, check_shape, config_of
from omnizoo.models.hf_private import (
    PACKED,
    auto_class,
    carries_state,
    check_names,
    language_model,
    text_embedding,
    uses_attention_interface,
)
from omnizoo.models.omni import OmniConfig, language_config
from omnizoo.models.published_files import carry, read_published, read_voices_beside
from omnizoo.models.shell import open_shell
from omnizoo.models.stateful import bind_states, has_states
from omnizoo.models.vocabulary import grow, may_grow

RECIPE = "_omnizoo_recipe"  # where a model keeps the recipe that the config names for it
RECIPE_EXPECTED = "an instance of omnizoo.Recipe"
Built = TypeVar("Built", bound=nn.Module)
MASTER_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
FROZEN_DTYPE = MASTER_DTYPE | {"bf16": torch.bfloat16}  # of what an adapter leaves as it is


class UnbuildableError(UserError):
    """A config that the family's own code cannot build a model from."""


def build_model(model: Model, precision: str, device: str = "meta") -> nn.Module:
    """The causal language model of `model`, on meta for a run, in the dtype of the master weights of `precision`.

    Its attention keeps the samples of a pack apart. A module of the user's own (`model.module`) is called as Hugging
    Face models are, and has to hand its keyword arguments on to `omnizoo.attend`. With `model.adapter`, what is frozen
    is in the precision of the run itself.
    """
    check_names()
    built = _build_base(model, precision, device)
    if model.adapter is not None:
        settings = adapter_settings(model.adapter)
        check_base(built, settings)
        with torch.device(device):
            attach(built, settings, MASTER_DTYPE[precision], FROZEN_DTYPE[precision])
        check_shapes(built, settings)
    return built


def _build_base(model: Model, precision: str, device: str) -> nn.Module:
    if model.given is not None:
        return _with_recipe(copy_given(given_model(model), model, precision, device), model)
    if model.module is not None:
        with torch.device(device):
            return _with_recipe(_own_module(model).to(MASTER_DTYPE[precision]), model)
    config, origin = read_model_config(model), model.foundation or model
    source, has_weights = origin.path or origin.config, origin.path is not None
    published = read_published(Path(source), language_config(config), has_weights) if isinstance(source, str) else None
    built = build_from(config, model, precision, device)
    carry(built, published or read_voices_beside(tokenizer_folder(model)))
    folder = model.path or model.config
    if isinstance(folder, str) and (Path(folder) / "generation_config.json").is_file():
        built.generation_config = read_generation_config(Path(folder))
    return built


def build_from(config: PretrainedConfig, model: Model, precision: str, device: str) -> PreTrainedModel:
    """The model of `config`, which is that of `model` or one made from it."""
    key = "model.foundation" if model.foundation else "model.path" if model.path else "model.config"
    builder = auto_class(config, model.trust_remote_code)
    if builder is None:
        raise UserError(f"{key}: transformers has no causal language model of type `{config.model_type}`")
    try:
        config.get_text_config()
    except ValueError as error:
        raise UserError(f"{key}: `{config.model_type}` is no single language model: {error}") from error
    try:
        with torch.device(device):
            built = builder.from_config(
                config, dtype=MASTER_DTYPE[precision], trust_remote_code=model.trust_remote_code
            )
    except UserError:
        raise
    except BUILDING_ERRORS as error:
        raise UnbuildableError(f"{key}: no `{config.model_type}` can be built from this: {explain(error)}") from error
    assert isinstance(built, PreTrainedModel)
    open_shell(built)
    for tokeniser in tokenisers(built).values():
        tokeniser.requires_grad_(False)
    # Parts of a composed model have configs, and so dtypes, of their own. `to` would make complex buffers real.
    (nn.Module.double if precision == "fp64" else nn.Module.float)(built)
    keep_states_apart(language_model(built), key)
    _set_attention(language_model(built), model.attention)
    return _with_recipe(built, model)


def _with_recipe(built: Built, model: Model) -> Built:
    """Let a model carry the recipe that the config names for it, so that whoever has the model has its facts."""
    if model.recipe is not None:
        vars(built)[RECIPE] = resolve(model.recipe, "model.recipe", RECIPE_EXPECTED)
    return built


def given_model(model: Model) -> nn.Module:
    """The object that `omnizoo.train(model=...)` was given. Nothing is ever done to it: a copy is trained."""
    if not isinstance(model.given, Given):
        raise UserError(f"model.given: {model.given} was an object in Python; give it to omnizoo.train again")
    found = model.given.value
    if not isinstance(found, nn.Module):
        shown = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__qualname__}"
        raise UserError(f"model= is {shown}; expected a torch.nn.Module, called as Hugging Face models are")
    is_shell = type(found).forward is nn.Module.forward
    if isinstance(found, PreTrainedModel) and not is_shell and found.get_output_embeddings() is None:
        raise UserError(f"model= is a {type(found).__name__}, which has no head; expected one that gives logits")
    return found


def is_own_module(model: Model) -> bool:
    """Is it a user's own code, which no config of transformers can build? Then it is only ever taken as it is."""
    if model.given is None:
        return model.module is not None
    found = given_model(model)
    return not (isinstance(found, PreTrainedModel) and auto_class(found.config, model.trust_remote_code) is not None)


def copy_given(given: nn.Module, model: Model, precision: str, device: str) -> nn.Module:
    """A copy of a module, on meta without its weights. Tied weights stay tied, frozen ones frozen."""
    tensors = [*given.parameters(), *given.buffers()]
    memo: dict[int, Any] = {id(t): _moved(t, device) for t in tensors} if device == "meta" else {}
    try:
        copied = deepcopy(given, memo)
    except BUILDING_ERRORS as error:
        raise UserError(f"model= is a {type(given).__name__} that cannot be copied: {explain(error)}") from error
    if isinstance(copied, PreTrainedModel):
        open_shell(copied)
        keep_states_apart(language_model(copied), "model=")
        _set_attention(language_model(copied), model.attention)
    return nn.Module.to(copied, MASTER_DTYPE[precision])


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _own_module(model: Model) -> nn.Module:
    assert model.module is not None
    assert isinstance(model.config, dict)
    builder = resolve(model.module, "model.module", "a class or function that builds a torch.nn.Module")
    try:
        built = builder(**model.config)
    except TypeError as error:
        raise UserError(f"model.module: {model.module} does not take the arguments in model.config: {error}") from error
    except UserError:
        raise
    except BUILDING_ERRORS as error:
        raise UserError(f"model.module: {model.module} fails: {explain(error)}") from error
    if not isinstance(built, nn.Module):
        raise UserError(f"model.module: {model.module} gave a {type(built).__name__}, not a torch.nn.Module")
    return built


def read_model_config(model: Model) -> Any:
    """The HF config of the model that `model` describes, with rows for all tokens where the vocabulary may grow."""
    config = _read_described(model)
    folder = tokenizer_folder(model)
    has_tokenizer = isinstance(model.tokenizer, Given) or (folder is not None and Path(folder).is_dir())
    if may_grow(model) and (has_tokenizer or model.resize_vocabulary):  # a model alone may be built without one
        grow(config, len(load_tokenizer(model)), model)
    return config


def _read_described(model: Model) -> Any:
    if model.given is not None:
        found = given_model(model)
        assert isinstance(found, PreTrainedModel)
        return deepcopy(found.config)
    if model.foundation is None:
        config = _read_config(model, "model", model.trust_remote_code)
        if isinstance(config, OmniConfig):
            config.allow_code = tuple(model.allow_code)
            list(config.parts())  # refused before anything else of the folder is looked at
        if model.part is None:
            return config
        if not isinstance(part := getattr(config, model.part, None), PretrainedConfig):
            known = ", ".join(name for name in config.sub_configs) or "none"
            raise UserError(f"model.part: `{config.model_type}` has no {model.part!r}; its parts: {known}")
        return part
    foundation = _read_config(model.foundation, "model.foundation", model.trust_remote_code)
    modalities = {name: _describe(name, modality) for name, modality in model.modalities.items()}
    composed = OmniConfig(foundation=foundation, modalities=modalities)
    composed.is_own = True
    return composed


def _describe(name: str, modality: Modality) -> dict[str, Any]:
    """A modality as the config of a composed model keeps it."""
    marks = {role: getattr(modality.marks, role) for role in ("begin", "placeholder", "end")}
    defaults = {"begin": f"<|{name}_begin|>", "placeholder": f"<|{name}_pad|>", "end": f"<|{name}_end|>"}
    described: dict[str, Any] = {"marks": {role: marks[role] or default for role, default in defaults.items()}}
    for role, part in (("encoder", modality.encoder), ("decoder", modality.decoder)):
        if part is not None:
            projector = modality.projector if role == "encoder" else None
            described[role] = _describe_part(part, projector, f"model.modalities.{name}.{role}")
    return described


def _describe_part(part: EncoderPart, projector: Projector | None, key: str) -> dict[str, Any]:
    folder = part.path or (part.config if isinstance(part.config, str) else None)
    config = None
    if isinstance(part.config, dict) or (folder and (Path(folder) / "config.json").is_file()):
        try:
            config = _read_config(part, key, trust_remote_code=False).to_dict()
        except UserError:
            if part.config is not None:
                raise
            # a folder that is not a transformers model (a diffusers tokeniser, a codebook): the class reads it itself
    # absolute: a folder that is saved with a model is relative to it
    spec = {
        "kind": part.kind,
        "options": part.options,
        "config": config,
        "folder": folder and str(Path(folder).resolve()),
    }
    return spec | {"projector": {**projector.options, "kind": projector.kind} if projector else None}


def _read_config(model: Model | Part, section: str, trust_remote_code: bool) -> Any:
    """The HF config of `path` or `config` (folder or inline mapping)."""
    if isinstance(model.config, dict):
        return config_of(model.config, f"{section}.config")
    key, folder = (f"{section}.path", model.path) if model.path else (f"{section}.config", model.config)
    assert isinstance(folder, str)
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"{key}: {folder} is not a Hugging Face model folder (no config.json in it){hub_hint(folder, 'model')}"
        )
    settings = check_settings(Path(folder), trust_remote_code, key)
    if not isinstance(settings.get("model_type"), str) and not trust_remote_code:
        raise UserError(f"{key}: {folder}/config.json has no `model_type`")
    check_numbers(settings, f"{key}: {folder}/config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except UserError as error:
        raise UserError(f"{key}: {folder}/config.json: {error}") from error
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: cannot read {folder}/config.json: {explain(error)}") from error
    check_shape(config, key)
    return config


def read_generation_config(folder: Path) -> GenerationConfig:
    read_json(folder / "generation_config.json")
    try:
        return GenerationConfig.from_pretrained(folder)
    except BUILDING_ERRORS as error:
        raise UserError(f"cannot read {folder}/generation_config.json: {explain(error)}") from error


def tokenizer_folder(model: Model) -> str | None:
    origin = model.foundation or model
    named = None if isinstance(model.tokenizer, Given) else model.tokenizer
    return named or origin.path or (origin.config if isinstance(origin.config, str) else None)


def load_tokenizer(model: Model) -> Any:
    """The HF tokenizer of `model.tokenizer`, or of the model's own folder."""
    if isinstance(model.tokenizer, Given):
        return _given_tokenizer(model.tokenizer.value)
    folder = tokenizer_folder(model)
    if folder is None and model.given is not None:
        raise UserError("model.tokenizer: give the folder of a Hugging Face tokenizer, or an object: tokenizer=")
    if folder is None:
        raise UserError("model.tokenizer: an inline model.config needs the folder of a Hugging Face tokenizer")
    if not Path(folder).is_dir():
        raise UserError(f"model.tokenizer: {folder} is not a folder{hub_hint(folder, 'model')}")
    if model.tokenizer is None:
        _read_described(model)  # AutoTokenizer reads it too, and would blame the tokenizer for what is wrong with it
    check_settings(Path(folder), model.trust_remote_code, "model.tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the tokenizers library raises `Exception` itself for what it cannot read
        raise UserError(f"model.tokenizer: no tokenizer in {folder}: {explain(error)}") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        # where there is no file, transformers makes an empty tokenizer of the family without a word
        raise UserError(f"model.tokenizer: no tokenizer in {folder}: it has no vocabulary (a tokenizer.json, say)")
    if model.foundation is not None:
        marks = [mark for name, m in model.modalities.items() for mark in _describe(name, m)["marks"].values()]
        tokenizer.add_special_tokens({"extra_special_tokens": marks}, replace_extra_special_tokens=False)
    return tokenizer


def _given_tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer= is a {type(tokenizer).__name__}; expected a fast tokenizer of transformers")
    return deepcopy(tokenizer)


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """An id past the embedding is an index error deep inside the first step, or silence on some devices."""
    if not isinstance(model, PreTrainedModel):
        return
    rows = int(text_embedding(model).get_parameter("weight").shape[0])
    if len(tokenizer) > rows:
        raise UserError(
            f"model.tokenizer: {len(tokenizer)} tokens do not fit the model's vocabulary of {rows}; set "
            "model.resize_vocabulary: true to give the embedding and the head rows for them, or use the model's own "
            "tokenizer"
        )


def keep_states_apart(model: PreTrainedModel, key: str) -> None:
    """See that layers with a state along the sequence do not carry it from one packed sample into the next."""
    bound = bind_states(model)
    if any("indexed" in kind for kind in _layer_kinds(model)):
        raise UserError(
            f"{key}: `{model.config.model_type}` has layers whose attention sees what an index picks among all tokens "
            "of a pack, those of other samples too; use another family"
        )
    kinds = [kind for kind in _layer_kinds(model) if "attention" not in kind or "linear" in kind]
    if len(kinds) > bound or (carries_state(model) and not bound):
        what = ", ".join(sorted(set(kinds))) or "recurrent"
        raise UserError(
            f"{key}: `{model.config.model_type}` has {what} layers, which carry state across packed samples by code "
            "that cannot be told where these end; use another family"
        )


def _layer_kinds(model: PreTrainedModel) -> list[str]:
    """What each layer mixes tokens by, as the config says it; empty if it does not."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    return [kind for kind in types if kind not in ("mlp", "moe")]


def _only_states(model: PreTrainedModel) -> bool:
    """Whether it has no attention at all."""
    kinds = _layer_kinds(model)
    return has_states(model) and bool(kinds) and all("linear" in kind for kind in kinds)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if name != "auto":
        try:
            model.set_attn_implementation(name)
        except BUILDING_ERRORS as error:
            raise UserError(f"model.attention: `{name}` does not work here: {explain(error)}") from error
        return
    if not uses_attention_interface(model) and not _only_states(model):
        raise UserError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so the samples of a pack "
            "cannot be kept apart; use a family that does"
        )
    model.set_attn_implementation(PACKED)
    carry_pack(model)
