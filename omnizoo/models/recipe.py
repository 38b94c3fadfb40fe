"""Recipes: data that describes how to shard a model family and how to build its inputs.

Most of this data is read from the model. A family's file (`recipes/<model_type>.py`) contains one `RECIPE` with the few
values that its code and config do not contain. Families without a file use the default recipe.
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

from omnizoo.config.errors import UserError
from omnizoo.config.plugins import resolve
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Modality
from omnizoo.modalities.frozen_tokenizer import frozen_tokenizers
from omnizoo.modalities.item import Ids, MediaItem
from omnizoo.models.check_config_fields import EXPERTS, VISITED, read_field
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.hf_private import block_class_names, expert_modules
from omnizoo.models.media.features import Features
from omnizoo.models.media.media_model import MediaModule, SpeakerFormat
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens

LANGUAGE_WIDTH: Any = object()  # in `Recipe.small_config`: the width of the small language model
RECIPE = "_omnizoo_recipe"  # attribute of a model that stores the recipe of `model.recipe`
Options = Mapping[str, Mapping[str, Any]]  # `options` in the config, keyed by modality; "NAME/decoder" for decoders


@dataclass(frozen=True)
class Recipe:
    """Properties of a model family that its Hugging Face code and config do not contain.

    All fields are optional. For a language model, the defaults are usually sufficient. Each field has a
    comment that describes its value.
    """

    about: str = ""  # published models of the family
    blocks: tuple[str, ...] = ()  # block classes to shard and recompute; if empty, the model's `_no_split_modules`
    small_config: Mapping[str, Any] = field(default_factory=dict)  # values of config fields for a small copy
    # Names of the config fields for the widths of a head: (query-key width, value width).
    attention_width: tuple[str, str] | None = None
    # For recurrent layers: names of the config fields for the number of heads, and rows and columns of the state.
    state_size: tuple[str, str, str] | None = None
    # Whether the family has experts that expert parallelism can distribute. None: only if the default config has
    # experts. True: some models have experts, although the default config has none. False: the experts of the family do
    # not use transformers' experts interface.
    has_experts: bool | None = None
    # Multimodal families: (model, tokenizer folder, options) -> modalities, keyed by name. The model is on meta.
    modalities: Callable[[PreTrainedModel, str | None, Options], dict[str, Modality]] | None = None
    positions: Callable[[PreTrainedModel, Ids, Sequence[MediaItem]], npt.NDArray[Any]] | None = (
        None  # returns the position ids of one sample, [position axes, tokens], see `Positions`
    )
    # Returns the bidirectional tokens of a model. None if all attention is causal.
    bidirectional: Callable[[PreTrainedModel], BidirectionalTokens | None] | None = None
    # (model, inputs of its forward, features by modality) -> inputs with the features inserted.
    merge_features: Callable[[PreTrainedModel, dict[str, Any], dict[str, Features]], dict[str, Any]] | None = None
    # Changes the keyword arguments that the model passes to its language model.
    language_model_inputs: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    media_modules: tuple[MediaModule, ...] = ()
    # Path of the module that maps embeddings to logits (`model` in the fields above); empty for the complete model.
    language: str = ""
    speaker_format: SpeakerFormat | None = None  # for speech-only families: format of a turn
    idle: tuple[str, ...] = ()  # paths of modules that no training step runs
    # Classes whose weights the family's initialization omits or sets to a constant; `Class.name` for a single buffer.
    uninitialized: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """A recipe applied to one model: module names and sizes that parallelism needs."""

    blocks: tuple[str, ...]  # paths of modules to shard and recompute, in order of execution
    experts: tuple[str, ...]  # paths of modules that contain all experts of a layer and use transformers' interface
    num_experts: int  # includes experts that do not use the interface
    heads: int  # 0 if unknown
    kv_heads: int


def count_experts(config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of experts per layer and of experts per token; (0, 0) for a dense model.

    If layers differ, return the maximum.
    """

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
    """Return the recipe of a family, or the default recipe."""
    name = f"omnizoo.recipes.{model_type}"
    if not model_type.isidentifier() or find_spec(name) is None:
        return Recipe()
    recipe = getattr(import_module(name), "RECIPE", Recipe())
    assert isinstance(recipe, Recipe)
    return recipe


def recipe_from_config(spec: ModelSection) -> Recipe | None:
    """Return the recipe that `model.recipe` names, or None."""
    if spec.recipe is None:
        return None
    expected = "an instance of omnizoo.Recipe"
    recipe = resolve(spec.recipe, "model.recipe", expected)
    if not isinstance(recipe, Recipe):
        raise UserError(f"model.recipe: {spec.recipe} is a {type(recipe).__name__}; expected {expected}")
    return recipe


def store_recipe(model: nn.Module, spec: ModelSection) -> None:
    """Store the recipe that `model.recipe` names on `model`. All code that builds a model from a config calls this."""
    vars(model)[RECIPE] = recipe_from_config(spec)


def recipe_for(model: nn.Module) -> Recipe:
    """Return the recipe that the config sets for `model`, or the recipe of its family if the config sets none."""
    if (recipe := vars(model).get(RECIPE)) is not None:
        assert isinstance(recipe, Recipe)
        return recipe
    return recipe_of(model.config.model_type) if isinstance(model, PreTrainedModel) else Recipe()


def _blocks(model: nn.Module, classes: set[str]) -> list[str]:
    """Return the modules of these classes, in order of execution.

    If some of these modules are in module lists, modules elsewhere (an embedding, a complete encoder) are not returned,
    even if the model's authors declare them as blocks.
    """
    frozen = tuple(f"{name}." for name in frozen_tokenizers(model))  # `forward` does not run these modules
    modules = dict(model.named_modules())
    candidates: list[str] = []
    in_lists: list[str] = []
    for name, module in modules.items():
        if type(module).__name__ not in classes or name.startswith(frozen):
            continue
        candidates.append(name)
        parent = modules[name.rpartition(".")[0]]
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            in_lists.append(name)

    blocks = in_lists or candidates
    return [name for name in blocks if not any(name.startswith(other + ".") for other in blocks)]


def _block_classes(model: nn.Module) -> set[str]:
    """Return the class names of the blocks, from the recipes of the model's families and from its code."""
    denoiser = denoiser_recipe(model)
    if denoiser is not None:
        return set(denoiser.blocks)
    classes = set(recipe_for(model).blocks)
    if classes:
        return classes
    for submodel in model.modules():  # a composed model consists of several models
        if isinstance(submodel, PreTrainedModel):
            classes |= set(recipe_of(submodel.config.model_type).blocks) or block_class_names(submodel)
    return classes | block_class_names(model)


def read_facts(model: nn.Module) -> ModelFacts:
    """Return the facts about `model` from the recipes of its families and from the model itself."""
    blocks = _blocks(model, _block_classes(model))
    if not blocks:
        raise UserError(
            f"model: {type(model).__name__} cannot be sharded, because it does not declare its blocks. Set the class "
            "attribute `_no_split_modules` to the class names of the blocks."
        )
    owners = Counter(id(p) for name in blocks for p in model.get_submodule(name).parameters())
    if any(count > 1 for count in owners.values()):
        raise UserError(
            f"model: blocks of {type(model).__name__} share weights, but each block is sharded separately. "
            "Use another model family."
        )

    heads = kv_heads = declared_experts = 0
    if isinstance(model, PreTrainedModel):
        config = model.config.get_text_config()
        heads = read_field(config, "num_attention_heads") or 0
        kv_heads = read_field(config, "num_key_value_heads") or 0
        declared_experts, _ = count_experts(config)
    denoiser = denoiser_recipe(model)
    if denoiser is not None:
        diffusers_config: Any = model.config
        heads = diffusers_config[denoiser.heads]
    experts = expert_modules(model)
    return ModelFacts(
        blocks=tuple(blocks),
        experts=tuple(experts),
        num_experts=max((int(module.num_experts) for module in experts.values()), default=declared_experts),
        heads=heads,
        kv_heads=kv_heads or heads,
    )
