"""Checks of Hugging Face config fields before a model is built. Each error is one line that names the field.

transformers accepts any field and value. An invalid value would fail later, deep inside transformers, or not at all.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.build import BUILDING_ERRORS, explain
from omnizoo.models.untrusted_folders import check_numbers, field_name, shorten

# Config fields for the number of experts per layer, and for the number of experts per token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts")
VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "ffn_config.moe_top_k")
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "sliding_window"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "num_channels", *EXPERTS),
}


def read_field(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a config, or None if it does not exist.

    If some layers override the field, return the value that applies to all other layers. Such a field cannot be read as
    an attribute, because transformers raises an error.
    """
    fields = config.to_dict()
    family_name = config.attribute_map.get(name, name)
    return fields[family_name] if family_name in fields else getattr(config, name, None)


def config_of(inline: Mapping[str, Any], key: str) -> PretrainedConfig:
    """Return the config that a mapping with `model_type` describes.

    `key` is the config key of the mapping, for messages.
    """
    fields = deepcopy(dict(inline))  # transformers modifies nested mappings in place
    check_numbers(fields, key)
    model_type = fields.pop("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        close = get_close_matches(str(model_type)[:100], list(CONFIG_MAPPING), n=1)
        hint = f"did you mean {close[0]}?" if close else "the installed transformers has no such family"
        raise UserError(f"{key}.model_type: {shorten(model_type)} is unknown; {hint}")

    family = CONFIG_MAPPING[model_type]
    for name, cls, prefix in unknown_fields(family, fields):
        close = get_close_matches(name, sorted(declared(cls)), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"see {cls.__name__} of transformers for its fields"
        config_type = cls.model_type or model_type
        raise UserError(f"{key}.{prefix}{field_name(name)}: not a field of `{config_type}`; {hint}")

    _check_inline_values(fields, key, family)
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **fields)
    except BUILDING_ERRORS as error:
        raise UserError(f"{key}: not a valid config of `{model_type}`: {explain(error)}") from error
    check_shape(config, key)
    return config


def _check_inline_values(fields: Mapping[str, Any], key: str, cls: Any) -> None:
    """Check values that the user wrote inline.

    Values from a folder are not checked, because the family may not use them.
    """
    for field, value in fields.items():
        name = str(field)  # keys of `id2label` are integers
        if isinstance(value, Mapping):
            _check_inline_values(value, f"{key}.{name}", getattr(cls, "sub_configs", {}).get(name))
        if isinstance(value, bool) or not isinstance(value, int | float) or value == getattr(cls, name, None):
            continue  # the default of the family is always accepted
        if name == "sliding_window" and fields.get("use_sliding_window") is False:
            continue

        expected = _expected_range(name, value)
        if expected:
            raise UserError(f"{key}.{name}: {value} is out of range; expected {expected}")


def _expected_range(name: str, value: float) -> str:
    """Return the valid range of the field `name` if `value` is out of range, otherwise an empty string."""
    if name in SIZES and value < 1:
        return "at least 1"
    if "drop" in name and not 0 <= value < 1:
        return "a fraction that is at least 0 and less than 1"
    if name.endswith(("eps", "epsilon", "range", "std")) and value < 0:
        return "at least 0"
    if name in ("rope_theta", "factor") and value <= 0:
        return "a number greater than 0"
    return ""


def check_shape(config: PretrainedConfig, key: str) -> None:
    """Check sizes that would otherwise fail only when the model runs."""
    try:
        text = config.get_text_config()
    except ValueError:  # the config has several text configs, as in a codec, and none of them is trained
        return

    def read(name: str) -> Any:  # some families raise an error for attributes that differ between layers
        return vars(text).get(text.attribute_map.get(name, name))

    heads = read("num_attention_heads")
    kv_heads = read("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise UserError(f"{key}.num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")

    expert_counts = [read(name) for name in EXPERTS]
    num_experts = next((count for count in expert_counts if isinstance(count, int)), None)
    per_token = read("num_experts_per_tok")
    if num_experts and isinstance(per_token, int) and not 1 <= per_token <= num_experts:
        raise UserError(
            f"{key}.num_experts_per_tok: {per_token} is out of range; expected 1 to {num_experts}, "
            "the number of experts"
        )

    rope = read("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    by_layer_type = [value for value in rope.values() if isinstance(value, Mapping)]
    for settings in (rope, *by_layer_type):
        theta = settings.get("rope_theta", 1.0)
        if not isinstance(theta, int | float) or not theta > 0:
            raise UserError(f"{key}.rope_theta: {shorten(theta)} is not valid; expected a number greater than 0")


def unknown_fields(
    cls: type[PretrainedConfig], fields: Mapping[str, Any], place: str = ""
) -> Iterator[tuple[str, type[PretrainedConfig], str]]:
    """Yield fields that `cls` does not declare and that its code does not mention.

    Each result is (field, config class, prefix of the field's key).
    """
    for name in fields:
        if name not in declared(cls) and not hasattr(cls, str(name)) and not _mentioned(cls, str(name)):
            yield name, cls, place
    for name, part in cls.sub_configs.items():
        inner = fields.get(name)
        if isinstance(inner, Mapping):
            part = CONFIG_MAPPING.get(str(inner.get("model_type"))) if part is AutoConfig else part
            if isinstance(part, type) and issubclass(part, PretrainedConfig):
                yield from unknown_fields(part, inner, f"{place}{name}.")


def declared(cls: type[PretrainedConfig]) -> set[str]:
    """Return the names of all fields that a config class declares."""
    names = {"model_type", *cls.attribute_map, *inspect.signature(cls).parameters, *cls.sub_configs}
    if is_dataclass(cls):
        names.update(field.name for field in dataclass_fields(cls))
    return names


def _mentioned(cls: type[PretrainedConfig], name: str) -> bool:
    """Whether the family's code reads an undeclared field: an old name, or a field that only the model class uses."""
    quoted = rf"[\"']{re.escape(name)}[\"']|\b(config|self)\.{re.escape(name)}\b"
    if not name.isidentifier():
        return False
    in_family = any(re.search(quoted, text) for text in _family_sources(inspect.getfile(cls)))
    return in_family or any(re.search(quoted, text) for text in _base_sources())


@cache
def _family_sources(file: str) -> tuple[str, ...]:
    """Return the source files of the family whose config is in `file`."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted(Path(file).parent.glob("*.py")))


@cache
def _base_sources() -> tuple[str, ...]:
    """Return the sources of the base classes of all configs, without decorators."""
    bases = [base for base in PretrainedConfig.__mro__ if base.__module__.startswith("transformers.")]
    return tuple(_class_source(base) for base in bases)


def _class_source(cls: type) -> str:
    """Return the source of a class up to the next statement of its module.

    `inspect.getsource` returns the same text, but takes tenths of a second to parse and tokenize the file.
    """
    text = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    (first,) = re.finditer(rf"^class {cls.__name__}\b.*:$", text, re.MULTILINE)
    following = re.compile(r"^[^\s#)]", re.MULTILINE).search(text, first.end())
    return text[first.start() : following.start() if following else None]


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of tokens in the model's vocabulary, or None if the config does not contain it."""
    if not isinstance(model, PreTrainedModel):
        return None
    return getattr(model.config.get_text_config(), "vocab_size", None)
