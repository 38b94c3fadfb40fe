"""Build the model of a config on the meta device, without weights or memory.

The model is the unmodified class of transformers or diffusers, a composed model, or a user module.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.hub import local_path
from omnizoo.config.plugins import call
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.build import BUILDING_ERRORS, explain
from omnizoo.modalities.frozen_tokenizer import frozen_tokenizers
from omnizoo.models.adapters.lora import attach
from omnizoo.models.adapters.peft_files import adapter_settings, check_base, check_shapes
from omnizoo.models.diffusion.denoiser import build_denoiser, is_denoiser
from omnizoo.models.export_files import keep_export_files, read_published, read_voices_beside
from omnizoo.models.hf_private import (
    PACKED,
    auto_class,
    carries_state,
    check_names,
    language_model,
    text_embedding,
    uses_attention_interface,
)
from omnizoo.models.interfaces.attention import carry_pack
from omnizoo.models.interfaces.recurrent import bind_states, has_states
from omnizoo.models.interfaces.score_head import HEAD, use_score_head
from omnizoo.models.media.composed_config import language_config
from omnizoo.models.read_config import read_generation_config, read_model_config, tokenizer_folder
from omnizoo.models.recipe import store_recipe
from omnizoo.models.user_module import given_model
from omnizoo.models.wrapper_models import use_inner_forward

MASTER_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
FROZEN_DTYPE = MASTER_DTYPE | {"bf16": torch.bfloat16}  # dtype of the frozen weights of a model with an adapter


class UnbuildableError(UserError):
    """Raised if transformers' code for the model family cannot build a model from the config."""


def build_model(model: ModelSection, precision: str, device: str = "meta") -> nn.Module:
    """Build the model that `model` describes, on the meta device unless `device` is set.

    Attention keeps the samples of a pack apart. A user module (`model.module`) is called like a Hugging Face model and
    must pass its keyword arguments on to `omnizoo.attend`.

    Args:
        model: The section `model` of the config.
        precision: The precision of the run: `fp32`, `bf16` or `fp64`. It determines the dtype of the master weights.
            With `model.adapter`, frozen weights are stored in this precision.
        device: The device to build on. On `meta`, the model has no weights.

    Returns:
        The model, with adapter matrices if `model.adapter` is set.

    Raises:
        UserError: If the config, the folder or the adapter cannot be used.
    """
    check_names()
    built = _build_base(model, precision, device)
    store_recipe(built, model)
    if model.adapter is not None:
        settings = adapter_settings(model.adapter)
        if model.score_head is not None and HEAD not in settings.modules_to_save:
            settings = settings.model_copy(update={"modules_to_save": [*settings.modules_to_save, HEAD]})
        check_base(built, settings)
        with torch.device(device):
            attach(built, settings, MASTER_DTYPE[precision], FROZEN_DTYPE[precision])
        check_shapes(built, settings)
    return built


def _build_base(model: ModelSection, precision: str, device: str) -> nn.Module:
    """Build the model without its adapter, from a Python object, a user module or a config."""
    if model.given is not None:
        return copy_given(given_model(model), model, precision, device)
    if model.module is not None:
        with torch.device(device):
            return _build_user_module(model).to(MASTER_DTYPE[precision])
    if is_denoiser(model):
        denoiser = build_denoiser(model, device)
        return denoiser.double() if precision == "fp64" else denoiser.float()

    config = read_model_config(model)
    language_section = model.foundation or model
    source = language_section.path or language_section.config
    published = None
    if isinstance(source, str):
        has_weights = language_section.path is not None
        published = read_published(Path(local_path(source)), language_config(config), has_weights)

    built = build_from(config, model, precision, device)
    keep_export_files(built, published or read_voices_beside(tokenizer_folder(model)))

    folder = model.path or model.config
    if isinstance(folder, str) and (Path(local_path(folder)) / "generation_config.json").is_file():
        built.generation_config = read_generation_config(Path(local_path(folder)))
    return built


def build_from(config: PretrainedConfig, model: ModelSection, precision: str, device: str) -> PreTrainedModel:
    """Build the model of `config`. This config belongs to `model`, or is derived from it."""
    key = _source_key(model)
    builder = auto_class(config, model.trust_remote_code)
    if builder is None:
        raise UserError(
            f"{key}: transformers has no causal language model of type `{config.model_type}`. Use another model."
        )
    try:
        config.get_text_config()
    except ValueError as error:
        raise UserError(f"{key}: `{config.model_type}` is not a single language model: {error}") from error

    try:
        with torch.device(device):
            built = builder.from_config(
                config, dtype=MASTER_DTYPE[precision], trust_remote_code=model.trust_remote_code
            )
    except UserError:
        raise
    except BUILDING_ERRORS as error:
        raise UnbuildableError(
            f"{key}: cannot build a `{config.model_type}` model from this config: {explain(error)}"
        ) from error
    assert isinstance(built, PreTrainedModel)

    for tokenizer in frozen_tokenizers(built).values():
        tokenizer.requires_grad_(False)
    # The components of a composed model have separate configs and may have different dtypes, so convert all of them.
    # `to` is not used, because it would also convert complex buffers to real ones.
    if precision == "fp64":
        nn.Module.double(built)
    else:
        nn.Module.float(built)

    _keep_samples_apart(built, model.attention, key)
    store_recipe(built, model)
    return built


def _source_key(model: ModelSection) -> str:
    """Return the config key that defines the model, for messages."""
    if model.foundation:
        return "model.foundation"
    return "model.path" if model.path else "model.config"


def copy_given(original: nn.Module, model: ModelSection, precision: str, device: str) -> nn.Module:
    """Copy a module. On meta, its weights are not copied. Tied weights stay tied, and frozen weights stay frozen."""
    memo: dict[int, Any] = {}  # copies keyed by the id of the original tensor, in the format of `deepcopy`
    if device == "meta":
        for tensor in (*original.parameters(), *original.buffers()):
            memo[id(tensor)] = _copy_to(tensor, device)
    try:
        copied = deepcopy(original, memo)
    except BUILDING_ERRORS as error:
        raise UserError(f"model=: cannot copy a {type(original).__name__}: {explain(error)}") from error
    if isinstance(copied, PreTrainedModel):
        _keep_samples_apart(copied, model.attention, "model=")
    return nn.Module.to(copied, MASTER_DTYPE[precision])


def _copy_to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return `tensor` on `device`. A parameter stays a parameter."""
    copied = tensor.detach().to(device)
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _build_user_module(model: ModelSection) -> nn.Module:
    """Build the user module that `model.module` names, with `model.config` as arguments."""
    assert model.module is not None
    assert isinstance(model.config, dict)
    built = call(model.module, "model.module", "a class or function that builds a torch.nn.Module", model.config)
    if not isinstance(built, nn.Module):
        raise UserError(f"model.module: {model.module} returned a {type(built).__name__}; expected a torch.nn.Module")
    return built


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Check that the embedding has a row for each token of the tokenizer.

    Otherwise the first step would raise an index error deep inside the model, or be silently wrong on some devices.
    """
    if not isinstance(model, PreTrainedModel):
        return
    rows = int(text_embedding(model).get_parameter("weight").shape[0])
    if len(tokenizer) > rows:
        raise UserError(
            f"model.tokenizer: {len(tokenizer)} tokens do not fit the model's vocabulary of {rows}. Set "
            "model.resize_vocabulary: true to add rows to the embedding and the head, or use the model's tokenizer."
        )


def _keep_samples_apart(built: PreTrainedModel, attention: str, key: str) -> None:
    """Prevent attention and recurrent layers of `built` from mixing the samples of a pack."""
    use_inner_forward(built)
    use_score_head(built)
    keep_states_apart(language_model(built), key)
    _set_attention(language_model(built), attention)


def keep_states_apart(model: PreTrainedModel, key: str) -> None:
    """Reset the state of recurrent layers at sample boundaries. Raise a `UserError` if a layer does not support it."""
    num_bound = bind_states(model)
    kinds = _layer_kinds(model)
    if any("indexed" in kind for kind in kinds):
        raise UserError(
            f"{key}: `{model.config.model_type}` has layers whose attention selects tokens by an index over the whole "
            "pack, including tokens of other samples. Use another model family."
        )

    recurrent = [kind for kind in kinds if "attention" not in kind or "linear" in kind]
    if len(recurrent) > num_bound or (carries_state(model) and not num_bound):
        listed = ", ".join(sorted(set(recurrent))) or "recurrent"
        raise UserError(
            f"{key}: `{model.config.model_type}` has {listed} layers. Their code carries state from one packed sample "
            "to the next and does not accept sample boundaries. Use another model family."
        )


def _layer_kinds(model: PreTrainedModel) -> list[str]:
    """Return the config's `layer_types`, without MLP and MoE layers; empty if the config has no such field."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    return [kind for kind in types if kind not in ("mlp", "moe")]


def _only_states(model: PreTrainedModel) -> bool:
    """Whether all layers are recurrent, without any attention."""
    kinds = _layer_kinds(model)
    return has_states(model) and bool(kinds) and all("linear" in kind for kind in kinds)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Select the attention implementation `name`; `auto` selects packed attention."""
    if name != "auto":
        try:
            model.set_attn_implementation(name)
        except BUILDING_ERRORS as error:
            raise UserError(f"model.attention: `{name}` does not work with this model: {explain(error)}") from error
        return

    if not uses_attention_interface(model) and not _only_states(model):
        raise UserError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so attention cannot be "
            "kept within the samples of a pack. Use another model family."
        )
    model.set_attn_implementation(PACKED)
    carry_pack(model)
