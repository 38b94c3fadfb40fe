"""A user's config, small enough to prove on a CPU: few layers, small widths, the same structure.

Kept: the ratio of heads to key-value heads, the number of experts and of those a token visits, every kind of layer,
sliding windows (shortened, so that they bite), tied weights, the tokenizer, the data.
"""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from omnizoo.config.schema import Config, Model
from omnizoo.models.build import read_model_config, tokenizer_folder
from omnizoo.models.fields import unknown_fields
from omnizoo.recipes.base import recipe_of

HEADS, HEAD_DIM, PACK_TOKENS = 8, 16, 96
# Widths and depths by the names that configs of encoders have for them; heads stay as they are if they divide these.
TOWER = {
    "hidden_size": 64,
    "d_model": 64,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "depth": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
}
DROPPED = {"architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "quantization_config"}


def shrink(config: Config, world: int, precision: str) -> Config:
    """The config that `omnizoo verify` runs: `config` with a small random model and small steps for `world` ranks."""
    data: dict[str, Any] = {"look_ahead": 16, "lanes": world, "workers": 0}
    if not reads_media(config.model):  # items must fit into a pack
        data["pack_tokens"] = min(config.data.pack_tokens, PACK_TOKENS)
    train = {"steps": 3, "global_batch": world, "micro_batch": 1, "warmup_steps": 0}
    return config.model_copy(
        update={
            "model": shrink_model(config.model),
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update=train),
            "parallel": config.parallel.model_copy(update={"precision": precision}),
        }
    )


def reads_media(model: Model) -> bool:
    if model.foundation is not None or model.module is not None:
        return bool(model.modalities)
    return recipe_of(read_model_config(model).model_type).modalities is not None


def shrink_model(model: Model) -> Model:
    """A model of the same families and structure, with random weights. A user's own module is taken as it is."""
    if model.module is not None:
        return model
    small: dict[str, Any] = {"path": None, "tokenizer": tokenizer_folder(model)}
    if model.foundation is None:
        return model.model_copy(update=small | {"config": shrink_config(read_model_config(model))})
    composed = read_model_config(model)
    foundation = {"path": None, "config": shrink_config(composed.foundation)}
    modalities = {}
    for name, modality in model.modalities.items():
        encoder, described = modality.encoder, composed.modalities[name].get("encoder")
        if encoder is not None and described["config"] is not None:
            # Decoders stay: their tokenisers are part of what the data is.
            encoder = encoder.model_copy(update={"path": None, "config": shrink_tower(described["config"])})
        modalities[name] = modality.model_copy(update={"encoder": encoder})
    small |= {"foundation": model.foundation.model_copy(update=foundation), "modalities": modalities}
    return model.model_copy(update=small)


def shrink_tower(fields: dict[str, Any]) -> dict[str, Any]:
    """An encoder's config with small widths; what it takes in stays as it is."""
    return _kept(fields) | {key: min(value, fields[key]) for key, value in TOWER.items() if fields.get(key)}


def shrink_config(published: PretrainedConfig) -> dict[str, Any]:
    """An inline config of the same family and structure."""
    family = published.model_type
    fields: dict[str, Any] = published.to_dict()
    text = published.get_text_config()
    if text is not published:  # a family of several models: each by itself, then what its recipe says of the whole
        parts = {
            name: shrink_config(part) if type(part) is type(text) else shrink_tower(part.to_dict())
            for name in published.sub_configs
            if isinstance(part := getattr(published, name, None), PretrainedConfig)
        }
        width = parts[next(name for name in parts if parts[name]["model_type"] == text.model_type)]["hidden_size"]
        for part in parts.values():  # what encoders give out is what the text takes in
            part |= {key: width for key in ("out_hidden_size", "output_dim") if key in part}
        return _merged(_kept(fields) | parts, recipe_of(family).shrink) | {"model_type": family}
    heads = min(HEADS, published.num_attention_heads)
    kv_heads = getattr(published, "num_key_value_heads", None) or published.num_attention_heads
    small: dict[str, Any] = {
        "hidden_size": heads * HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, kv_heads * heads // published.num_attention_heads),
        "head_dim": HEAD_DIM,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 2,
        "attention_dropout": 0.0,
    }
    layers = fields.get("layer_types")
    if layers:
        small["layer_types"] = _cover(layers)
        small["num_hidden_layers"] = len(small["layer_types"])
    if fields.get("sliding_window"):
        small["sliding_window"] = min(fields["sliding_window"], PACK_TOKENS // 6)
    small = {key: value for key, value in small.items() if key in fields} | dict(recipe_of(family).shrink)
    return _kept(fields) | small | {"model_type": family}


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    """What an inline config may hold: a published one has fields of its own that no code reads."""
    family = CONFIG_MAPPING[fields["model_type"]] if "model_type" in fields else None
    unread = {name for name, _, place in unknown_fields(family, fields) if not place} if family else set()
    return {key: value for key, value in fields.items() if key not in DROPPED | unread}


def _merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `changes`, mapping by mapping."""
    return fields | {
        key: _merged(fields[key], value) if isinstance(value, Mapping) and isinstance(fields.get(key), dict) else value
        for key, value in changes.items()
    }


def _cover(kinds: list[str]) -> list[str]:
    """The shortest beginning of `kinds`, at least two long, that has every kind; each kind once if that is too long."""
    for length in range(2, min(len(kinds), 6) + 1):
        if set(kinds[:length]) == set(kinds):
            return kinds[:length]
    distinct = list(dict.fromkeys(kinds))
    return distinct if len(distinct) > 1 else distinct * 2
