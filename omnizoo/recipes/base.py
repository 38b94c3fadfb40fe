"""What a recipe is: facts about a model family, and no code paths. Most are read off the model itself.

A family's file (`recipes/<model_type>.py`) holds one `RECIPE` with the few facts that its code and config do not tell;
a family without a file gets the default one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import block_class_names, is_experts


@dataclass(frozen=True)
class Recipe:
    """Facts of a family, beyond what its Hugging Face code says. `shrink` is for `omnizoo verify`."""

    about: str = ""  # the published models of the family
    blocks: tuple[str, ...] = ()  # classes to shard and recompute one by one; empty: those the model calls indivisible
    shrink: Mapping[str, Any] = field(default_factory=dict)  # small values for config fields that are the family's own
    attention_width: tuple[str, str] | None = None  # config fields (query-key width, value width) of a head, if two


@dataclass(frozen=True)
class Facts:
    """A recipe applied to one model: module names and sizes that distribution needs."""

    blocks: tuple[str, ...]  # modules to shard and recompute, in order of execution
    experts: tuple[str, ...]  # modules that hold all experts of a layer
    num_experts: int
    heads: int  # 0: not known
    kv_heads: int


def recipe_of(model_type: str) -> Recipe:
    """The recipe of a family, or the default one."""
    name = f"{__package__}.{model_type}"
    if not model_type.isidentifier() or find_spec(name) is None:
        return Recipe()
    recipe = getattr(import_module(name), "RECIPE", Recipe())
    assert isinstance(recipe, Recipe)
    return recipe


def read_facts(model: nn.Module) -> Facts:
    """What the recipe of `model`'s family, and the model itself, say about it."""
    config = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    own = recipe_of(config.model_type).blocks if config else ()
    classes = set(own) or block_class_names(model)
    blocks: list[str] = []
    for name, module in model.named_modules():
        nested = blocks and name.startswith(blocks[-1] + ".")
        if type(module).__name__ in classes and not nested:
            blocks.append(name)
    if not blocks:
        raise UserError(
            f"model: {type(model).__name__} does not say which of its modules are blocks (no `_no_split_modules`): it "
            "cannot be sharded block by block"
        )
    heads: int = getattr(config, "num_attention_heads", 0)
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    return Facts(
        blocks=tuple(blocks),
        experts=tuple(experts),
        num_experts=max((int(module.num_experts) for module in experts.values()), default=0),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
    )
