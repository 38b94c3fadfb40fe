"""FLOPs of training on a pack.

The language model costs FLOPs per token, attention per pair of tokens, the head and decoders per target. Encoders and
followers report their cost separately (`MediaSize.cost`). A recurrent layer updates and reads its state once per token,
whatever the chunk size of the kernel. Attention inside a user module is not counted; all its weights, including the
head, count for each token.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.modalities.base import CustomFlops, Decoder
from omnizoo.modalities.flop_count import FlopCounter, causal_pairs, is_trained, weights_of
from omnizoo.modalities.frozen_tokenizer import Frozen, frozen_tokenizers
from omnizoo.models.hf_private import language_model
from omnizoo.models.interfaces.recurrent import state_products
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.media_model import MediaModel
from omnizoo.models.recipe import Recipe, count_experts, recipe_for, recipe_of


@dataclass(frozen=True)
class FlopCount:
    """Forward and backward FLOPs, given which components are trained or frozen."""

    per_token: float
    per_target: float = 0.0
    per_pair: Mapping[int | None, float] = field(default_factory=dict)  # sum over layers, by attention window
    per_place: Mapping[str, float] = field(default_factory=dict)  # for each decoder: embedding one target as input
    per_predicted: Mapping[str, float] = field(default_factory=dict)  # for each decoder: loss of one target
    per_pair_ahead: float = 0.0  # sum over layers in which bidirectional tokens attend ahead

    def of(
        self,
        lengths: Iterable[int],
        targets: int,
        places: Mapping[str, int],
        predicted: Mapping[str, int],
        ahead: int = 0,
    ) -> float:
        """Return the FLOPs of samples with the given lengths.

        Args:
            lengths: Tokens of each sample.
            targets: Number of text tokens to predict.
            places: Number of placeholder tokens of each decoder.
            predicted: Number of targets of each decoder.
            ahead: Number of token pairs in which the first token attends to a later one (bidirectional tokens).
        """
        flops = self.per_target * targets + self.per_pair_ahead * ahead
        for length in lengths:
            flops += self.per_token * length
            flops += sum(each * causal_pairs(length, window) for window, each in self.per_pair.items())
        flops += sum(self.per_place.get(name, 0.0) * count for name, count in places.items())
        return flops + sum(self.per_predicted.get(name, 0.0) * count for name, count in predicted.items())


def count_flops(model: nn.Module) -> FlopCount:
    """Return the FLOPs of `model` per token, pair and target."""
    if not isinstance(model, PreTrainedModel):
        return FlopCount(_flops_of([model], is_trained(model)))
    language, media, recipe = language_model(model), media_model(model), recipe_for(model)
    head = getattr(model.get_output_embeddings(), "weight", None)
    trunk = _run_trunk(model, language, media, head)
    trunk.add(state_flops(language, recipe))
    last = FlopCounter(trunk.trained)
    if head is not None:
        last.multiply(head, 1)
    per_pair = {}
    for window, layers in attention_windows(language.config).items():
        pair = FlopCounter(trunk.trained)
        pair.attend(layers, attention_width(language.config, recipe))
        per_pair[window] = pair.flops
    mutual = media.bidirectional
    ahead = sum(each for window, each in per_pair.items() if mutual and (mutual.everywhere or window is not None))
    entering, predicted = {}, {}
    for port, decoder in media.built_decoders.items():
        entering[port.modality] = _flops_of(modules_run_by(decoder, "embed"), False)
        predicted[port.modality] = _flops_of(modules_run_by(decoder, "loss"), trunk.trained)
    return FlopCount(trunk.flops, last.flops, per_pair, entering, predicted, ahead)


def _flops_of(modules: Iterable[nn.Module], trained: bool) -> float:
    """Return the FLOPs of modules that run in sequence on one row.

    If `trained`, gradients flow to modules before them.
    """
    counter = FlopCounter(trained)
    for module in modules:
        counter.run(module, 1)
    return counter.flops


def _run_trunk(model: PreTrainedModel, language: PreTrainedModel, media: MediaModel, head: Any) -> FlopCounter:
    """Count the language model on one token, without its head."""
    # Modules outside the language model produce features that replace embeddings, so they come before it.
    inside = {id(parameter) for parameter in (*language.parameters(), head)}
    beside = tuple(f"{module.module}." for module in media.modules_of("follower"))
    outside = [p for name, p in model.named_parameters() if id(p) not in inside and not name.startswith(beside)]
    trunk = FlopCounter(trained=any(parameter.requires_grad for parameter in outside))
    experts, visited = count_experts(language.config)
    apart = [f"{name}." for name in frozen_tokenizers(language)]  # their cost is counted by decoders
    if language is model:  # modules that decoders run per target are counted there
        apart += [f"{module.module}." for module in media.modules_of("decoder") if module.module]
    for name, parameter, is_multiplied in weights_of(language):
        if name.startswith(tuple(apart)) or (is_multiplied and parameter is head):
            continue
        if is_multiplied:
            is_expert = "experts" in name.split(".") or (parameter.ndim == 3 and len(parameter) == experts)
            trunk.multiply(parameter, visited / experts if experts and is_expert else 1)
        trunk.trained |= parameter.requires_grad
    return trunk


def modules_run_by(decoder: Decoder, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
    """Return the modules that a decoder runs per target. By default `loss` runs all trained modules."""
    if isinstance(decoder, CustomFlops):
        return decoder.modules_run_by(method)
    return [module for module in decoder.children() if not isinstance(module, Frozen)] if method == "loss" else []


def state_flops(language: PreTrainedModel, recipe: Recipe) -> float:
    """Return the forward FLOPs of all recurrent layers for one token.

    Each product with a state `[K, V]` costs 2 K V.
    """
    names = recipe.state_size or recipe_of(language.config.model_type).state_size
    if names is None:
        return 0.0
    heads, deep, wide = (getattr(language.config, name) for name in names)
    return float(sum(2 * count * heads * deep * wide for count in state_products(language)))


def attention_windows(config: PretrainedConfig) -> dict[int | None, float]:
    """Return the number of attention layers for each window; None is the window of full attention.

    A layer with heads twice as wide as others counts twice.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return {getattr(config, "sliding_window", None) if uses else None: config.num_hidden_layers}
    # A hybrid layer has both attention and a recurrent state.
    near, seen = getattr(config, "sliding_window", None), defaultdict[int | None, float](float)
    fields = config.to_dict()
    widths = {int(layer): told.get("head_dim") for layer, told in (fields.get("per_layer_config") or {}).items()}
    for layer, kind in enumerate(kinds):
        if kind == "hybrid" or ("attention" in kind and "linear" not in kind):
            share = (widths.get(layer) or fields["head_dim"]) / fields["head_dim"] if widths else 1
            seen[near if kind.startswith("sliding") else None] += share
    return seen


def attention_width(config: PretrainedConfig, recipe: Recipe | None = None) -> float:
    """Return heads x mean of query-key width and value width. `recipe` is the recipe of the complete model."""
    names = (recipe and recipe.attention_width) or recipe_of(config.model_type).attention_width
    # Read from the mapping: the attribute cannot be read if layers differ.
    default = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    width = sum(getattr(config, name) for name in names) / 2 if names else default
    return float(config.num_attention_heads * width)
