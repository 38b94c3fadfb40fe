"""FLOPs of training on a pack: the language model by its tokens, attention by its pairs, the head by its targets and
decoders by their targets. What encoders cost, they say themselves (`Size.cost`).

Not known, and not counted: how a user's own module attends (its weights count on every token, a head's too), and the
states of recurrent layers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from omnizoo.assembly.published import media_model
from omnizoo.modalities.base import Decoder
from omnizoo.modalities.frozen import Frozen
from omnizoo.modalities.tally import Tally, causal_pairs, is_trained, weights_of
from omnizoo.models.hf_private import language_model
from omnizoo.recipes.base import Recipe, count_experts, recipe_for, recipe_of


@dataclass(frozen=True)
class FlopCount:
    """Forward and backward, as the parts of the model are trained or frozen."""

    per_token: float
    per_target: float = 0.0
    per_pair: Mapping[int | None, float] = field(default_factory=dict)  # by window: of all layers that have it
    per_place: Mapping[str, float] = field(default_factory=dict)  # by decoder: of a target fed back in
    per_predicted: Mapping[str, float] = field(default_factory=dict)  # and of one to be predicted

    def of(
        self, lengths: Iterable[int], targets: int, places: Mapping[str, int], predicted: Mapping[str, int]
    ) -> float:
        """Of samples of these lengths with `targets` tokens to predict, and places of each decoder's items."""
        flops = self.per_target * targets
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
    trunk = Tally(trained=any(p.requires_grad and id(p) not in inside for p in model.parameters()))
    experts, visited = count_experts(language.config)
    for name, parameter, is_multiplied in weights_of(language):
        if is_multiplied and parameter is head:
            continue
        if is_multiplied:
            is_expert = "experts" in name.split(".") or (parameter.ndim == 3 and len(parameter) == experts)
            trunk.multiply(parameter, visited / experts if experts and is_expert else 1)
        trunk.trained |= parameter.requires_grad
    per_pair = {}
    for window, layers in attention_windows(language.config).items():
        pair = Tally(trunk.trained)
        pair.attend(layers, attention_width(language.config, recipe_for(model)))
        per_pair[window] = pair.flops
    last = Tally(trunk.trained)
    if head is not None:
        last.multiply(head, 1)
    entering, predicted = {}, {}
    for name, prefix in media_model(model).producers.items():
        decoder = model.get_submodule(prefix)
        assert isinstance(decoder, Decoder)
        enter, leave = Tally(), Tally(trunk.trained)
        for part, module in decoder.named_children():
            if not isinstance(module, Frozen):
                (enter if part in decoder.entering else leave).run(module, 1)
        entering[name], predicted[name] = enter.flops, leave.flops
    return FlopCount(trunk.flops, last.flops, per_pair, entering, predicted)


def attention_windows(config: PretrainedConfig) -> Counter[int | None]:
    """Layers that attend, by how far back a token sees; None: to the beginning of its sample."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return Counter({getattr(config, "sliding_window", None) if uses else None: config.num_hidden_layers})
    attending = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    near = getattr(config, "sliding_window", None)
    return Counter(near if kind.startswith("sliding") else None for kind in attending)


def attention_width(config: PretrainedConfig, recipe: Recipe | None = None) -> float:
    """Heads x the mean of the widths that scores and values are products of; `recipe` is of the whole model."""
    names = (recipe and recipe.attention_width) or recipe_of(config.model_type).attention_width
    # From the mapping: of a config whose layers differ, the attribute cannot be read.
    default = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    width = sum(getattr(config, name) for name in names) / 2 if names else default
    return float(config.num_attention_heads * width)
