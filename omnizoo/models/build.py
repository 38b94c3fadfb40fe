"""Config -> module on meta: no weights, no memory, the untouched class that transformers ships."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import omnizoo.models.attention  # noqa: F401 - registers our attention
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.models.hf_private import PACKED, carries_state, uses_attention_interface

MASTER_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}


def build_model(model: Model, precision: str) -> nn.Module:
    """The causal language model of `model`, on meta, in the dtype of the master weights of `precision`.

    Its attention keeps the samples of a pack apart. A module of the user's own (`model.module`) is called as Hugging
    Face models are, and has to hand its keyword arguments on to `omnizoo.attend`.
    """
    if model.module is not None:
        with torch.device("meta"):
            return _own_module(model).to(MASTER_DTYPE[precision])
    config = read_model_config(model)
    key = "model.path" if model.path else "model.config"
    remote = model.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not remote and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{key}: transformers has no causal language model of type `{config.model_type}`")
    _refuse_state_across_tokens(config, key)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(
            config, dtype=MASTER_DTYPE[precision], trust_remote_code=model.trust_remote_code
        )
    assert isinstance(built, PreTrainedModel)
    folder = model.path or model.config
    if isinstance(folder, str) and (Path(folder) / "generation_config.json").is_file():
        built.generation_config = GenerationConfig.from_pretrained(folder)
    _set_attention(built, model.attention)
    return built


def _own_module(model: Model) -> nn.Module:
    assert model.module is not None
    assert isinstance(model.config, dict)
    path, _, name = model.module.partition(":")
    try:
        built = getattr(import_module(path), name)(**model.config)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.module: cannot import {model.module}: {error}") from error
    except TypeError as error:
        raise UserError(f"model.module: {model.module} does not take the arguments in model.config: {error}") from error
    if not isinstance(built, nn.Module):
        raise UserError(f"model.module: {model.module} gave a {type(built).__name__}, not a torch.nn.Module")
    return built


def read_model_config(model: Model) -> Any:
    """The HF config of `model.path` or `model.config` (folder or inline mapping)."""
    if isinstance(model.config, dict):
        fields = dict(model.config)
        model_type = fields.pop("model_type")
        try:
            return AutoConfig.for_model(model_type, **fields)
        except (ValueError, TypeError) as error:
            raise UserError(f"model.config: {str(error).splitlines()[0]}") from error
    key, folder = ("model.path", model.path) if model.path else ("model.config", model.config)
    assert isinstance(folder, str)
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{key}: {folder} is not a Hugging Face model folder (no config.json in it)")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: cannot read {folder}/config.json: {str(error).splitlines()[0]}") from error


def tokenizer_folder(model: Model) -> str | None:
    return model.tokenizer or model.path or (model.config if isinstance(model.config, str) else None)


def load_tokenizer(model: Model) -> Any:
    """The HF tokenizer of `model.tokenizer`, or of the model's own folder."""
    folder = tokenizer_folder(model)
    if folder is None:
        raise UserError("model.tokenizer: an inline model.config needs the folder of a Hugging Face tokenizer")
    if not Path(folder).is_dir():
        raise UserError(f"model.tokenizer: {folder} is not a folder")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.tokenizer: no tokenizer in {folder}: {str(error).splitlines()[0]}") from error


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """An id past the embedding is an index error deep inside the first step, or silence on some devices."""
    if not isinstance(model, PreTrainedModel):
        return
    rows = int(model.get_input_embeddings().get_parameter("weight").shape[0])
    if len(tokenizer) > rows:
        raise UserError(
            f"model.tokenizer: {len(tokenizer)} tokens do not fit the model's vocabulary of {rows}; "
            f"set vocab_size in model.config to at least {len(tokenizer)}, or use the model's own tokenizer"
        )


def _refuse_state_across_tokens(config: Any, key: str) -> None:
    """Recurrent and linear-attention layers carry state from one packed sample into the next."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
    carried = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if carried:
        raise UserError(
            f"{key}: `{config.model_type}` has {', '.join(carried)} layers, which carry state across packed samples; "
            "such families are not supported yet"
        )


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if name != "auto":
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise UserError(f"model.attention: `{name}` does not work here: {str(error).splitlines()[0]}") from error
        return
    if not uses_attention_interface(model) or carries_state(model):
        raise UserError(
            f"model: {type(model).__name__} does not use transformers' attention interface, so the samples of a pack "
            "cannot be kept apart; use a family that does"
        )
    model.set_attn_implementation(PACKED)
