"""A user's config, small enough to prove on a CPU: few layers, small widths, the same structure.

Kept: the ratio of heads to key-value heads, the number of experts and of those a token visits, every kind of layer,
sliding windows (shortened, so that they bite), tied weights, the tokenizer, the data.
"""

from typing import Any

from omnizoo.config.schema import Config
from omnizoo.models.build import read_model_config, tokenizer_folder
from omnizoo.recipes.base import recipe_of

HEADS, HEAD_DIM, PACK_TOKENS = 8, 16, 96


def shrink(config: Config, world: int, precision: str) -> Config:
    """The config that `omnizoo verify` runs: `config` with a small random model and small steps for `world` ranks."""
    model = {"path": None, "config": shrink_model(config), "tokenizer": tokenizer_folder(config.model)}
    data = {"pack_tokens": min(config.data.pack_tokens, PACK_TOKENS), "look_ahead": 16, "lanes": world, "workers": 0}
    train = {"steps": 3, "global_batch": world, "micro_batch": 1, "warmup_steps": 0}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "data": config.data.model_copy(update=data),
            "train": config.train.model_copy(update=train),
            "parallel": config.parallel.model_copy(update={"precision": precision}),
        }
    )


def shrink_model(config: Config) -> dict[str, Any]:
    """An inline model config of the same family and structure. A user's own module is taken as it is."""
    if config.model.module is not None:
        assert isinstance(config.model.config, dict)
        return config.model.config
    published = read_model_config(config.model)
    family = published.model_type
    fields: dict[str, Any] = published.to_dict()
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
    dropped = {"architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "quantization_config"}
    kept = {key: value for key, value in fields.items() if key not in dropped}
    return kept | small | {"model_type": family}


def _cover(kinds: list[str]) -> list[str]:
    """The shortest beginning of `kinds`, at least two long, that has every kind; each kind once if that is too long."""
    for length in range(2, min(len(kinds), 6) + 1):
        if set(kinds[:length]) == set(kinds):
            return kinds[:length]
    distinct = list(dict.fromkeys(kinds))
    return distinct if len(distinct) > 1 else distinct * 2
