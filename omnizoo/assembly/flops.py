"""FLOPs of training on a pack: the language model by its tokens, attention by its pairs, the head by its targets and
decoders by their targets. What encoders and followers cost, they say themselves (`Size.cost`).

A layer with a state writes to it and reads from it once per token, whatever the chunks that kernels take it in. Not
known, and not counted: how a user's own module attends (its weights count on every token, a head's too).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.assembly.published import media_model
from omnizoo.modalities.frozen import tokenisers
from omnizoo.modalities.tally import Tally, causal_pairs, is_trained, weights_of
from omnizoo.models.hf_private import language_model
from omnizoo.models.stateful import state_products
from omnizoo.recipes.base import Recipe, count_experts, recipe_for, recipe_of


@dataclass(frozen=True)
class FlopCount:
    """Forward and backward, as the parts of the model are trained or frozen."""

    per_token: float
    per_target: float = 0.0
    per_pair: Mapping[int | None, float] = field(default_factory=dict)  # by window: of all layers that have it
    per_place: Mapping[str, float] = field(default_factory=dict)  # by decoder: of a target fed back in
    per_predicted: Mapping[str, float] = field(default_factory=dict)  # and of one to be predicted
    per_pair_ahead: float = 0.0  # of tokens that see each other: in all layers where they do

    def of(
        self,
        lengths: Iterable[int],
        targets: int,
        places: Mapping[str, int],
        predicted: Mapping[str, int],
        ahead: int = 0,
    ) -> float:
        """Of samples of these lengths with `targets` tokens to predict, and places of each decoder's items; `ahead`:
        pairs of which the first sees the second only as they see each other."""
        flops = self.per_target * targets + self.per_pair_ahead * ahead
        for length in lengths:
            flops += self.per_token * length
            flops += sum(each * causal_pairs(length, window) for window, each in self.per_pair.items())
        flops += sum(self.per_place.get(name, 0.0) * count for name, count in places.items())
        return flops + sum(self.per_predicted.get(name, 0.0) * count for name, count in predicted.items())


def count_flops(model: nn.Module) -> FlopCount:
    if not isinstance(model, PreTrainedModel):
        tally = Tally(trained=is_trained(model))
        tally.run(model, 1)
        return FlopCount(tally.flops)
    language = language_model(model)
    head = getattr(model.get_output_embeddings(), "weight", None)
    # What is outside of the language model gives features in place of embeddings, and so comes before it.
    inside = {id(parameter) for parameter in (*language.parameters(), head)}
    beside = tuple(f"{name}." for name in media_model(model).followers.values())
    outside = [p for name, p in model.named_parameters() if id(p) not in inside and not name.startswith(beside)]
    trunk = Tally(trained=any(parameter.requires_grad for parameter in outside))
    experts, visited = count_experts(language.config)
    frozen = tuple(f"{name}." for name in tokenisers(language))  # what they cost, decoders say
    if language is model:  # what decoders run per target is counted with them
        frozen += tuple(f"{name}." for own in media_model(model).producers.values() for name in own)
    for name, parameter, is_multiplied in weights_of(language):
        if name.startswith(frozen) or (is_multiplied and parameter is head):
            continue
        if is_multiplied:
            is_expert = "experts" in name.split(".") or (parameter.ndim == 3 and len(parameter) == experts)
            trunk.multiply(parameter, visited / experts if experts and is_expert else 1)
        trunk.trained |= parameter.requires_grad
    trunk.add(state_flops(language, recipe_for(model)))
    per_pair = {}
    for window, layers in attention_windows(language.config).items():
        pair = Tally(trunk.trained)
        pair.attend(layers, attention_width(language.config, recipe_for(model)))
        per_pair[window] = pair.flops
    mutual = media_model(model).mutual
    ahead = sum(each for window, each in per_pair.items() if mutual and (mutual.everywhere or window is not None))
    last = Tally(trunk.trained)
    if head is not None:
        last.multiply(head, 1)
    entering, predicted = {}, {}
    for name, decoder in media_model(model).produced_by.items():
        enter, leave = Tally(), Tally(trunk.trained)
        for module in decoder.runs("embed"):
            enter.run(module, 1)
        for module in decoder.runs("loss"):
            leave.run(module, 1)
        entering[name], predicted[name] = enter.flops, leave.flops
    return FlopCount(trunk.flops, last.flops, per_pair, entering, predicted, ahead)


def state_flops(language: PreTrainedModel, recipe: Recipe) -> float:
    """Of all layers with a state, for a token, forward: each product with a state `[K, V]` is 2 K V."""
    names = recipe.state_size or recipe_of(language.config.model_type).state_size
    if names is None:
        return 0.0
    heads, deep, wide = (getattr(language.config, name) for name in names)
    return float(sum(2 * count * heads * deep * wide for count in state_products(language)))


def attention_windows(config: PretrainedConfig) -> dict[int | None, float]:
    """Layers that attend, by how far back a token sees; None: to the beginning of its sample. A layer whose heads are
    twice as wide as others counts twice."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return {getattr(config, "sliding_window", None) if uses else None: config.num_hidden_layers}
    # A hybrid layer does both.
    near, seen = getattr(config, "sliding_window", None), defaultdict[int | None, float](float)
    fields = config.to_dict()
    widths = {int(layer): told.get("head_dim") for layer, told in (fields.get("per_layer_config") or {}).items()}
    for layer, kind in enumerate(kinds):
        if kind == "hybrid" or ("attention" in kind and "linear" not in kind):
            share = (widths.get(layer) or fields["head_dim"]) / fields["head_dim"] if widths else 1
            seen[near if kind.startswith("sliding") else None] += share
    return seen


def attention_width(config: PretrainedConfig, recipe: Recipe | None = None) -> float:
    """Heads x the mean of the widths that scores and values are products of; `recipe` is of the whole model."""
    names = (recipe and recipe.attention_width) or recipe_of(config.model_type).attention_width
    # From the mapping: of a config whose layers differ, the attribute cannot be read.
    default = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    width = sum(getattr(config, name) for name in names) / 2 if names else default
    return float(config.num_attention_heads * width)
