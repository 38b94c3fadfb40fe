"""What a recipe is: facts about a model family, and no code paths. Most are read off the model itself.

A family's file (`recipes/<model_type>.py`) holds one `RECIPE` with the few facts that its code and config do not tell;
a family without a file gets the default one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy.typing as npt
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.config.doors import resolve
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Follower, Item, Modality
from omnizoo.modalities.frozen import tokenisers
from omnizoo.models.build import RECIPE, RECIPE_EXPECTED
from omnizoo.models.config_fields import read_field
from omnizoo.models.hf_private import block_class_names, is_experts
from omnizoo.models.media_batch import Features
from omnizoo.models.media_model import Ids, Turns
from omnizoo.ops.mutual import MutualTokens

Options = Mapping[str, Mapping[str, Any]]  # `options` in the config, by modality; of decoders by "NAME/decoder"

# What configs call the number of experts in a layer, and of those that a token visits.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts")
VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "ffn_config.moe_top_k")


@dataclass(frozen=True)
class Recipe:
    """Facts of a family, beyond what its Hugging Face code says. `shrink` is for `omnizoo verify`."""

    about: str = ""  # the published models of the family
    blocks: tuple[str, ...] = ()  # classes to shard and recompute one by one; empty: those the model calls indivisible
    shrink: Mapping[str, Any] = field(default_factory=dict)  # small values for config fields that are the family's own
    attention_width: tuple[str, str] | None = None  # config fields (query-key width, value width) of a head, if two
    state_size: tuple[str, str, str] | None = None  # config fields of layers with a state: heads, its rows, its columns
    # Experts that can be dealt out: True where some of its models have them, though not by the defaults of its config;
    # False where they do not go through transformers' interface.
    has_experts: bool | None = None
    # Families that read more than text. The model is on meta where its modalities are asked for.
    modalities: Callable[[PreTrainedModel, str | None, Options], dict[str, Modality]] | None = None
    positions: Callable[[PreTrainedModel, Ids, Sequence[Item]], npt.NDArray[Any]] | None = None  # [R, L] of a sample
    mutual: Callable[[PreTrainedModel], MutualTokens | None] | None = None  # tokens that see each other, run by run
    # What the model's forward is called with, features of media (by modality) among it.
    enter: Callable[[PreTrainedModel, dict[str, Any], dict[str, Features]], dict[str, Any]] | None = None
    towers: Mapping[str, str] = field(default_factory=dict)  # modality -> module that encodes it
    projectors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modules between tower and foundation
    # Modality that is produced in the sequence -> modules that only its decoder runs; (): none, but the model's own.
    producers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    language: str = ""  # the part that takes embeddings and gives logits, which all of the above is said of; "": all
    # Modality that is produced beside the sequence -> the module that follows it, and its class.
    followers: Mapping[str, tuple[str, Callable[..., Follower]]] = field(default_factory=dict)
    turns: Turns | None = None  # of a family that only speaks: how what its speakers say is written
    idle: tuple[str, ...] = ()  # modules that no training step runs
    # Classes whose weights the family's own rules for initial values leave out, or leave all alike; Class.name: of one.
    undrawn: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """A recipe applied to one model: module names and sizes that distribution needs."""

    blocks: tuple[str, ...]  # modules to shard and recompute, in order of execution
    experts: tuple[str, ...]  # modules that hold all experts of a layer, behind transformers' experts interface
    num_experts: int  # also of a model whose experts are not behind it
    heads: int  # 0: not known
    kv_heads: int


def count_experts(config: PretrainedConfig) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token visits; (0, 0) of a dense model. The most of any layer."""

    def read(names: Sequence[str]) -> int:
        for name in names:
            value: Any = config
            for part in name.split("."):
                value = getattr(value, part, None)
            value = max(value, default=0) if isinstance(value, list) else value
            if isinstance(value, int) and value > 0:
                return value
        return 0

    experts = read(EXPERTS)
    return (experts, read(VISITED) or 1) if experts > 1 else (0, 0)


def recipe_of(model_type: str) -> Recipe:
    """The recipe of a family, or the default one."""
    name = f"{__package__}.{model_type}"
    if not model_type.isidentifier() or find_spec(name) is None:
        return Recipe()
    recipe = getattr(import_module(name), "RECIPE", Recipe())
    assert isinstance(recipe, Recipe)
    return recipe


def own_recipe(spec: Model) -> Recipe | None:
    """The recipe that `model.recipe` names."""
    if spec.recipe is None:
        return None
    return _checked(resolve(spec.recipe, "model.recipe", RECIPE_EXPECTED))


def _checked(recipe: Any) -> Recipe:
    if not isinstance(recipe, Recipe):
        raise UserError(f"model.recipe: it names a {type(recipe).__name__}; expected {RECIPE_EXPECTED}")
    return recipe


def recipe_for(model: nn.Module) -> Recipe:
    """The recipe that the config names for `model`, or that of its family."""
    if RECIPE in vars(model):
        return _checked(vars(model)[RECIPE])
    return recipe_of(model.config.model_type) if isinstance(model, PreTrainedModel) else Recipe()


def _blocks(model: nn.Module, classes: set[str]) -> list[str]:
    """Modules of these classes, in order of execution. What stands alone (an embedding, a whole encoder) is no block,
    whatever its authors say, if others are members of a list."""
    found: list[tuple[str, bool]] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module).__name__ in classes:
            found.append((name, isinstance(modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)))
    frozen = tuple(f"{name}." for name in tokenisers(model))  # not run by `forward`
    found = [(name, is_listed) for name, is_listed in found if not name.startswith(frozen)]
    listed = [name for name, is_listed in found if is_listed] or [name for name, _ in found]
    return [name for name in listed if not any(name.startswith(other + ".") for other in listed)]


def read_facts(model: nn.Module) -> Facts:
    """What the recipes of `model`'s families, and the model itself, say about it."""
    config = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    classes = set(recipe_for(model).blocks)
    if not classes:
        for part in model.modules():  # a composed model is made of several
            if isinstance(part, PreTrainedModel):
                classes |= set(recipe_of(part.config.model_type).blocks) or block_class_names(part)
        classes |= block_class_names(model)
    blocks = _blocks(model, classes)
    if not blocks:
        raise UserError(
            f"model: {type(model).__name__} does not say which of its modules are blocks (no `_no_split_modules`): it "
            "cannot be sharded block by block"
        )
    owners = Counter(id(p) for name in blocks for p in model.get_submodule(name).parameters())
    if any(count > 1 for count in owners.values()):
        raise UserError(
            f"model: blocks of {type(model).__name__} share weights, and each is sharded by itself; use another family"
        )
    heads, kv_heads = (
        (config and read_field(config, name)) or 0 for name in ("num_attention_heads", "num_key_value_heads")
    )
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    declared = count_experts(config)[0] if config is not None else 0
    return Facts(
        blocks=tuple(blocks),
        experts=tuple(experts),
        num_experts=max((int(module.num_experts) for module in experts.values()), default=declared),
        heads=heads,
        kv_heads=kv_heads or heads,
    )
