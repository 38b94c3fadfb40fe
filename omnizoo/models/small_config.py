"""Describe small copies of models that run on a CPU: same family and structure, but few layers and small widths.

A small copy keeps the ratio of heads to key-value heads, the number of experts and of experts per token, every kind of
layer, sliding windows (shortened, so they have an effect) and tied weights. It has no pretrained weights. By default,
it has no dropout or router jitter, because random numbers depend on the layout.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from omnizoo.config.sections.model import ModelSection
from omnizoo.models.check_config_fields import EXPERTS, VISITED, read_field, unknown_fields
from omnizoo.models.read_config import read_model_config, tokenizer_folder
from omnizoo.models.recipe import LANGUAGE_WIDTH, Recipe, recipe_from_config, recipe_of
from omnizoo.models.user_module import is_own_module

HEADS, HEAD_DIM, WINDOW = 8, 16, 16
# Upper bounds for fields of language model configs, except heads and depth. Families use different names for the same
# field; the `attribute_map` of a config adds more.
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
    # sparse attention: select fewer tokens than a sample has
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "rotary_dim": 8,
    # recurrent layers
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
    # one dense layer, if the first layers are dense
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
OUTPUT_WIDTHS = ("out_hidden_size", "output_dim")  # output widths of encoders, if they differ from the widths of layers
# Upper bounds of widths, depths and heads in encoder configs.
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
RANDOM = re.compile(r"drop|jitter")  # fields that make the forward pass random in training


@dataclass(frozen=True)
class Shrinking:
    """Settings for a small copy.

    The widths of some families depend on each other in special ways, so not all of them can be reduced.
    """

    widths: bool = True
    depth: bool = True
    vocabulary: int | None = None  # maximum vocabulary size; None keeps the size, to fit the tokenizer
    random: bool = False  # whether to keep dropout and jitter


def shrink_model(model: ModelSection, shrinking: Shrinking) -> ModelSection:
    """Return the config section of a small copy with random weights. For a user module, the section is unchanged."""
    if is_own_module(model):
        return model
    recipe = recipe_from_config(model)
    tokenizer = model.tokenizer or tokenizer_folder(model)
    update: dict[str, Any] = {"path": None, "given": None, "tokenizer": tokenizer, "resize_vocabulary": False}
    config = read_model_config(model)
    if model.foundation is None:
        update |= {"part": None, "config": shrink_config(config, shrinking, recipe)}
        return model.model_copy(update=update)

    foundation: dict[str, Any] = {"path": None, "config": shrink_config(config.foundation, shrinking, recipe)}
    modalities = {}
    for name, modality in model.modalities.items():
        encoder = modality.encoder
        description = config.modalities[name].get("encoder")
        if encoder is not None and description["config"] is not None:
            # Decoders stay unchanged, because their tokenizers determine the targets in the data.
            small_encoder = shrink_tower(description["config"], shrinking)
            if modality.projector is not None and modality.projector.kind == "none":
                small_encoder |= _output_width(small_encoder, foundation["config"]["hidden_size"])
            encoder = encoder.model_copy(update={"path": None, "config": small_encoder})
        modalities[name] = modality.model_copy(update={"encoder": encoder})
    update |= {"foundation": model.foundation.model_copy(update=foundation), "modalities": modalities}
    return model.model_copy(update=update)


def shrink_tower(fields: dict[str, Any], shrinking: Shrinking) -> dict[str, Any]:
    """Return an encoder config with small widths and depth. The input format is unchanged."""
    bounded = {key: min(bound, fields[key]) for key, bound in TOWER.items() if fields.get(key)}
    return _inline_fields(fields, shrinking) | bounded


def _output_width(fields: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return the encoder fields that make its features as wide as the foundation."""
    outputs = [name for name in OUTPUT_WIDTHS if name in fields]
    return dict.fromkeys(outputs or [name for name in WIDTHS if name in fields], width)


def shrink_config(published: PretrainedConfig, shrinking: Shrinking, recipe: Recipe | None = None) -> dict[str, Any]:
    """Return an inline config of the same family and structure. `recipe` replaces the recipe of the family."""
    recipe = recipe or recipe_of(published.model_type)
    if published.get_text_config() is not published:
        small = _merged(_shrink_parts(published, shrinking), recipe.small_config)
        width = _text_width(small, published.get_text_config().model_type)
        if width is not None:
            small = _with_language_width(small, width)
    else:
        changes = recipe.small_config if shrinking.widths else {}
        small = _merged(_shrink_language_model(published, shrinking), changes)
    return small | {"model_type": published.model_type}


def _shrink_parts(published: PretrainedConfig, shrinking: Shrinking) -> dict[str, Any]:
    """Shrink each sub-config of a multimodal config."""
    text = published.get_text_config()
    small_parts: dict[str, dict[str, Any]] = {}
    for name, part in _parts(published):
        if _has_text(part, text):
            small_parts[name] = shrink_config(part, shrinking)
        else:
            small_parts[name] = shrink_tower(part.to_dict(), shrinking)

    text_parts = [part for part in small_parts.values() if part["model_type"] == text.model_type]
    width = text_parts[0]["hidden_size"] if text_parts else None
    for small_part in small_parts.values() if width else ():  # encoders must output the width of the language model
        small_part |= {key: width for key in OUTPUT_WIDTHS if key in small_part}
    return _known_fields(published.to_dict() | small_parts)


def _shrink_language_model(published: PretrainedConfig, shrinking: Shrinking) -> dict[str, Any]:
    """Shrink depth, widths and vocabulary of a language model config."""
    fields = _inline_fields(published.to_dict(), shrinking)
    for name, part in _parts(published):
        if shrinking.widths and part.model_type:
            fields[name] = shrink_tower(part.to_dict(), shrinking)

    small: dict[str, Any] = {}
    if shrinking.depth:
        small |= _fewer_layers(published, fields)
    if shrinking.widths:
        small |= _small_widths(published, fields)
        for value in small.values():  # layers with a different head width get twice the width of the others
            layer_settings = value.values() if isinstance(value, dict) else ()
            for settings in layer_settings:
                if isinstance(settings, dict) and "head_dim" in settings:
                    settings["head_dim"] = 2 * HEAD_DIM
    if shrinking.vocabulary is not None and published.vocab_size > shrinking.vocabulary:
        small |= _few_tokens(fields, shrinking.vocabulary) | {"vocab_size": shrinking.vocabulary}

    small = {published.attribute_map.get(key, key): value for key, value in small.items()}
    return fields | {key: value for key, value in small.items() if key in fields}


def _parts(published: PretrainedConfig) -> list[tuple[str, PretrainedConfig]]:
    """Return the sub-configs of a config, by field name."""
    parts = [(name, getattr(published, name, None)) for name in published.sub_configs]
    return [(name, part) for name, part in parts if isinstance(part, PretrainedConfig)]


def _text_width(fields: Mapping[str, Any], model_type: str) -> int | None:
    """Return `hidden_size` of the nested config whose type is `model_type`; None if no config has this type."""
    for value in fields.values():
        if not isinstance(value, Mapping):
            continue
        if value.get("model_type") == model_type and "hidden_size" in value:
            width: int = value["hidden_size"]
            return width
        inner_width = _text_width(value, model_type)
        if inner_width is not None:
            return inner_width
    return None


def _with_language_width(fields: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Return `fields` with each `LANGUAGE_WIDTH` replaced by `width`."""
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            changed[key] = _with_language_width(value, width)
        else:
            changed[key] = width if value is LANGUAGE_WIDTH else value
    return changed


def _has_text(part: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Whether `part` is the config of a language model, or contains one."""
    return type(part) is type(text) or part.get_text_config() is not part


def _small_widths(published: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return small values of the width fields that the config has."""
    published_heads = _number(read_field(published, "num_attention_heads")) or HEADS
    published_kv_heads = _number(read_field(published, "num_key_value_heads")) or published_heads
    heads = min(HEADS, published_heads)
    kv_heads = max(1, published_kv_heads * heads // published_heads)
    small: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_kv_heads": kv_heads,
        "kv_channels": HEAD_DIM,
        "head_dim": HEAD_DIM,
    }
    small |= dict.fromkeys(WIDTHS, heads * HEAD_DIM)

    for key, bound in TEXT.items():
        value = fields.get(published.attribute_map.get(key, key))
        if isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(bound, value)
        elif isinstance(value, list) and value and all(isinstance(number, int) for number in value):
            small[key] = bound
    if "qk_rope_head_dim" in fields and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = TEXT["qk_rope_head_dim"]  # head_dim is the rotary width here

    for name in (*EXPERTS, *VISITED):  # if the config has one number per layer, use the largest for all layers
        value = fields.get(name)
        if isinstance(value, list) and value:
            small[name] = max(value)
    return small


def _fewer_layers(published: PretrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return config fields for a model with two layers, or more if needed to include every kind of layer.

    Per-layer fields are shortened accordingly.
    """
    depth = _number(getattr(published, "num_hidden_layers", None)) or 0
    by_number: dict[str, dict[int, Any]] = {}  # fields that list some layers by number
    lists: dict[str, list[Any]] = {}  # fields with one value per layer
    for key, value in fields.items():
        if _names_layers(key, value, depth):
            by_number[key] = _by_layer(value)
        elif isinstance(value, list) and len(value) == depth > 2:
            lists[key] = value

    def kind_of(layer: int) -> tuple[str, ...]:
        settings = [values[layer] for values in lists.values()]
        settings += [values.get(layer) for values in by_number.values()]
        return tuple(map(str, settings))

    chosen = _cover([kind_of(layer) for layer in range(depth)])
    small: dict[str, Any] = {key: [values[layer] for layer in chosen] for key, values in lists.items()}
    for key, values in by_number.items():
        renumbered: dict[int, Any] = {}
        for number, layer in enumerate(chosen):
            if values.get(layer) is not None:
                renumbered[number] = values[layer]
        small[key] = renumbered if isinstance(fields[key], Mapping) else list(renumbered)

    for name in DEPTHS:
        published_depth = getattr(published, name, None)
        if published_depth:
            small[name] = min(len(chosen), published_depth)
    return small


def _names_layers(key: str, value: Any, depth: int) -> bool:
    """Whether a field is a sorted list of layer numbers, or a mapping from layer numbers."""
    if isinstance(value, Mapping):
        return key != "id2label" and bool(value) and all(str(layer).isdigit() for layer in value)
    if not isinstance(value, list) or not re.search(r"layers$|idxs$|ids$", key):
        return False
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in value):
        return False
    return all(number < following < depth for number, following in pairwise(value) if number >= 0)


def _by_layer(value: Any) -> dict[int, Any]:
    """Return a per-layer field as a mapping from layer numbers."""
    if isinstance(value, Mapping):
        return {int(layer): settings for layer, settings in value.items()}
    return dict.fromkeys(value, "named")


def _cover(kinds: Sequence[Any]) -> list[int]:
    """Return at least two layer numbers that cover every kind.

    These are the first two to four layers if they cover every kind, otherwise the first layer of each kind.
    """
    for length in range(2, min(len(kinds), 4) + 1):
        if set(kinds[:length]) == set(kinds):
            return list(range(length))
    firsts = sorted(kinds.index(kind) for kind in set(kinds))
    return firsts if len(firsts) > 1 else [0, 1]


def _few_tokens(fields: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return fields for a smaller vocabulary.

    All special tokens get the last id of the vocabulary. Inputs of the probe never contain this id.
    """
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
    """Return the nonzero dropout and jitter fields of a config and its sub-configs."""
    nonzero: dict[str, float] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            nonzero |= random_fields(value, f"{prefix}{key}.")
        elif _is_random(key, value) and value:
            nonzero[prefix + key] = value
    return nonzero


def _is_random(key: Any, value: Any) -> bool:
    """Whether a field is a dropout or jitter probability."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and RANDOM.search(str(key)) is not None


def _without_random(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with dropout and jitter set to zero."""
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            changed[key] = _without_random(value)
        else:
            changed[key] = type(value)(0) if _is_random(key, value) else value
    return changed


def _number(value: Any) -> int | None:
    """Return `value`, or its maximum if it is a list with one number per layer."""
    if isinstance(value, list):
        return max((number for number in value if isinstance(number, int)), default=None)
    return value if isinstance(value, int) and value > 0 else None


def _inline_fields(fields: dict[str, Any], shrinking: Shrinking) -> dict[str, Any]:
    """Return the fields for an inline config; dropout and jitter are zero unless `shrinking.random`."""
    known = _known_fields(fields)
    return known if shrinking.random else _without_random(known)


def _known_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an inline config may contain.

    Fields that no code reads are omitted, also in nested configs. Published folders contain such fields.
    """
    unknown: set[str] = set()
    if fields.get("model_type") in CONFIG_MAPPING:
        family = CONFIG_MAPPING[fields["model_type"]]
        unknown = {f"{prefix}{name}" for name, _, prefix in unknown_fields(family, fields)}
    known = _without(fields, unknown)
    return {key: value for key, value in known.items() if key not in DROPPED}


def _without(fields: Mapping[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """Return `fields` without `keys`. A key is the dotted path of a field in nested mappings."""
    kept: dict[str, Any] = {}
    for key, value in fields.items():
        path = f"{prefix}{key}"
        if path not in keys:
            kept[key] = _without(value, keys, f"{path}.") if isinstance(value, Mapping) else value
    return kept


def _merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` updated by `changes`; nested mappings are merged."""
    merged = dict(fields)
    for key, value in changes.items():
        is_nested = isinstance(value, Mapping) and isinstance(fields.get(key), dict)
        merged[key] = _merged(fields[key], value) if is_nested else value
    return merged
