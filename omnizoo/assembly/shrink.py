"""A model small enough to try on a CPU: few layers, small widths, the same family and structure.

Kept: the ratio of heads to key-value heads, the number of experts and of those a token visits, every kind of layer,
sliding windows (shortened, so that they bite), tied weights. Left out: weights, and whatever draws random numbers in
training (dropout, router jitter), since what is drawn depends on the layout.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from omnizoo.config.model_section import Model
from omnizoo.models.build import is_own_module, read_model_config, tokenizer_folder
from omnizoo.models.config_fields import read_field, unknown_fields
from omnizoo.recipes.base import EXPERTS, VISITED, Recipe, own_recipe, recipe_of

HEADS, HEAD_DIM, WINDOW = 8, 16, 16
# Fields of language models' configs that may be lowered to these values, besides heads and depth. Names of one thing
# under several are those of different families; `attribute_map` of a config adds the family's own.
TEXT = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "dff": 64,
    "dim_ff": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "intermediate_size_mlp": 64,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    # attention to tokens that an index picks: fewer than a sample has
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "rotary_dim": 8,
    # layers with a state along the sequence
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 8,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "window_size": WINDOW,
    "local_attention": WINDOW,
    # one layer that is dense, where the first ones are
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "zero_expert_num": 16,
}
DEPTHS = ("num_hidden_layers", "num_layers", "num_layers_per_stack", "encoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "word_embed_proj_dim", "embedding_size", "d_model")
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
    "num_blocks": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
}
DROPPED = {"architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "quantization_config"}
RANDOM = re.compile(r"drop|jitter")  # fields that make a forward pass in training draw random numbers


@dataclass(frozen=True)
class Shrinking:
    """How much of a model is made small. Families whose widths hang together in ways of their own need less of it."""

    widths: bool = True
    depth: bool = True
    vocabulary: int | None = None  # rows to keep of it, where no tokenizer has to fit
    random: bool = False  # keep dropout and jitter


def shrink_model(model: Model, how: Shrinking) -> Model:
    """A model of the same families and structure, with random weights. A user's own module is taken as it is."""
    if is_own_module(model):
        return model
    own = own_recipe(model)
    tokenizer = model.tokenizer or tokenizer_folder(model)
    small: dict[str, Any] = {"path": None, "given": None, "tokenizer": tokenizer, "resize_vocabulary": False}
    if model.foundation is None:
        return model.model_copy(
            update=small | {"part": None, "config": shrink_config(read_model_config(model), how, own)}
        )
    composed = read_model_config(model)
    foundation = {"path": None, "config": shrink_config(composed.foundation, how, own)}
    modalities = {}
    for name, modality in model.modalities.items():
        encoder, described = modality.encoder, composed.modalities[name].get("encoder")
        if encoder is not None and described["config"] is not None:
            # Decoders stay: their tokenisers are part of what the data is.
            encoder = encoder.model_copy(update={"path": None, "config": shrink_tower(described["config"], how)})
        modalities[name] = modality.model_copy(update={"encoder": encoder})
    small |= {"foundation": model.foundation.model_copy(update=foundation), "modalities": modalities}
    return model.model_copy(update=small)


def shrink_tower(fields: dict[str, Any], how: Shrinking) -> dict[str, Any]:
    """An encoder's config with small widths; what it takes in stays as it is."""
    kept = _kept(fields) if how.random else _without_random(_kept(fields))
    return kept | {key: min(value, fields[key]) for key, value in TOWER.items() if fields.get(key)}


def shrink_config(published: PretrainedConfig, how: Shrinking, recipe: Recipe | None = None) -> dict[str, Any]:
    """An inline config of the same family and structure; `recipe` is one in place of the family's own."""
    family = published.model_type
    recipe = recipe or recipe_of(family)
    fields: dict[str, Any] = published.to_dict()
    text = published.get_text_config()
    if text is not published:  # a family of several models: each by itself, then what its recipe says of the whole
        parts = {
            name: shrink_config(part, how) if _has_text(part, text) else shrink_tower(part.to_dict(), how)
            for name in published.sub_configs
            if isinstance(part := getattr(published, name, None), PretrainedConfig)
        }
        width = next((part["hidden_size"] for part in parts.values() if part["model_type"] == text.model_type), None)
        for part in parts.values() if width else ():  # what encoders give out is what the text takes in
            part |= {key: width for key in ("out_hidden_size", "output_dim") if key in part}
        return _merged(_kept(fields) | parts, recipe.shrink) | {"model_type": family}
    fields = _kept(fields) if how.random else _without_random(_kept(fields))
    for name in published.sub_configs:
        if isinstance(part := getattr(published, name, None), PretrainedConfig) and how.widths and part.model_type:
            fields[name] = shrink_tower(part.to_dict(), how)
    own = published.attribute_map
    small: dict[str, Any] = {}
    if how.depth:
        small |= _fewer_layers(published, fields)
    if how.widths:
        small |= _small_widths(published, fields)
        for value in small.values():  # layers with heads of their own keep that they differ
            for told in value.values() if isinstance(value, dict) else ():
                if isinstance(told, dict) and "head_dim" in told:
                    told["head_dim"] = 2 * HEAD_DIM
    if how.vocabulary is not None and published.vocab_size > how.vocabulary:
        small |= _few_tokens(fields, how.vocabulary) | {"vocab_size": how.vocabulary}
    small = {own.get(key, key): value for key, value in small.items()}
    small = {key: value for key, value in small.items() if key in fields}
    return _merged(fields | small, recipe.shrink if how.widths else {}) | {"model_type": family}


def _has_text(part: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Is it the config of a language model, or of several models with one among them?"""
    return type(part) is type(text) or part.get_text_config() is not part


def _small_widths(published: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = published.attribute_map
    heads = min(HEADS, _number(read_field(published, "num_attention_heads")) or HEADS)
    whole = _number(read_field(published, "num_attention_heads")) or heads
    kv_heads = _number(read_field(published, "num_key_value_heads")) or whole
    few = max(1, kv_heads * heads // whole)
    small: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": few,
        "num_kv_heads": few,
        "kv_channels": HEAD_DIM,
        "head_dim": HEAD_DIM,
    }
    small |= dict.fromkeys(WIDTHS, heads * HEAD_DIM)
    for key, value in TEXT.items():
        found = fields.get(own.get(key, key))
        if isinstance(found, int) and not isinstance(found, bool):
            small[key] = min(value, found)
        elif isinstance(found, list) and found and all(isinstance(each, int) for each in found):
            small[key] = value
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = TEXT["qk_rope_head_dim"]  # of the rotary part
    for names in (EXPERTS, VISITED):  # one number for all layers, where each could have its own
        for name in names:
            if isinstance(found := fields.get(name), list) and found:
                small[name] = max(found)
    return small


def _fewer_layers(published: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers, or as many as it takes to have every kind. What is told of each layer is cut alike."""
    depth = _number(getattr(published, "num_hidden_layers", None)) or 0
    told = {key: value for key, value in fields.items() if _names_layers(key, value, depth)}
    lists = {key: value for key, value in fields.items() if isinstance(value, list) and len(value) == depth > 2}
    lists = {key: value for key, value in lists.items() if key not in told}
    kinds = [tuple(str(v[i]) for v in lists.values()) + tuple(_told(v, i) for v in told.values()) for i in range(depth)]
    chosen = _cover(kinds)
    small: dict[str, Any] = {key: [value[i] for i in chosen] for key, value in lists.items()}
    for key, value in told.items():
        places = {at: layer for at, layer in enumerate(chosen) if _told(value, layer) != "None"}
        small[key] = list(places) if isinstance(value, list) else {at: _of(value, i) for at, i in places.items()}
    depths = {name: getattr(published, name, None) for name in DEPTHS}
    return small | {name: min(len(chosen), found) for name, found in depths.items() if found}


def _names_layers(key: str, value: Any, depth: int) -> bool:
    """True for a list of some layers' numbers, in order, and for a mapping from layers' numbers."""
    if isinstance(value, Mapping):
        return key != "id2label" and bool(value) and all(str(layer).isdigit() for layer in value)
    is_named = re.search(r"layers$|idxs$|ids$", key) is not None
    numbers = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    return is_named and numbers and all(0 <= a < b < depth for a, b in zip([-1, *value], value, strict=False) if a >= 0)


def _told(value: Any, layer: int) -> str:
    return str(_of(value, layer)) if isinstance(value, Mapping) else "named" if layer in value else "None"


def _of(value: Mapping[Any, Any], layer: int) -> Any:
    return next((told for name, told in value.items() if int(name) == layer), None)


def _cover(kinds: Sequence[Any]) -> list[int]:
    """Numbers of layers that have every kind, at least two: the shortest beginning, or if long one of each kind."""
    for length in range(2, min(len(kinds), 4) + 1):
        if set(kinds[:length]) == set(kinds):
            return list(range(length))
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    return firsts if len(firsts) > 1 else [0, 1]


def _few_tokens(fields: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Ids of special tokens inside a smaller vocabulary: at its end, where no probe draws from."""
    small: dict[str, Any] = {}
    for key, value in fields.items():
        if key.endswith("_token_id") and value is not None:
            small[key] = vocabulary - 1 if isinstance(value, int) else [vocabulary - 1]
        elif key.startswith("vocab_size") and isinstance(value, int):
            small[key] = vocabulary
        elif key == "vocabulary_map" and isinstance(value, Mapping):
            small[key] = {name: min(id, vocabulary - 1) for name, id in value.items()}
    return small


def random_fields(fields: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Fields, also of parts, whose name says dropout or jitter and whose value is not zero."""
    found: dict[str, float] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found |= random_fields(value, f"{prefix}{key}.")
        elif RANDOM.search(str(key)) and isinstance(value, int | float) and not isinstance(value, bool) and value:
            found[prefix + key] = value
    return found


def _without_random(fields: Mapping[str, Any]) -> dict[str, Any]:
    def quiet(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _without_random(value)
        is_random = RANDOM.search(str(key)) and isinstance(value, int | float) and not isinstance(value, bool)
        return type(value)(0) if is_random else value

    return {key: quiet(key, value) for key, value in fields.items()}


def _number(value: Any) -> int | None:
    """`value`, or the largest of a list with one number per layer."""
    if isinstance(value, list):
        return max((each for each in value if isinstance(each, int)), default=None)
    return value if isinstance(value, int) and value > 0 else None


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    """What an inline config may hold: a published one has fields of its own that no code reads."""
    family = CONFIG_MAPPING[fields["model_type"]] if fields.get("model_type") in CONFIG_MAPPING else None
    unread = {name for name, _, place in unknown_fields(family, fields) if not place} if family else set()
    return {key: value for key, value in fields.items() if key not in DROPPED | unread}


def _merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `changes`, mapping by mapping."""
    return fields | {
        key: _merged(fields[key], value) if isinstance(value, Mapping) and isinstance(fields.get(key), dict) else value
        for key, value in changes.items()
    }
