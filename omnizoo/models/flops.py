"""FLOPs of training on a pack.

FLOPs are counted per token for the language model, per token pair for attention, and per target for the head and
decoders. Encoders and followers report their cost separately (`MediaSize.cost`). A recurrent layer updates and reads
its state once per token, regardless of the chunk size of the kernel. For a user module, attention is not counted, and
all weights, including the head, are counted for each token.
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
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens


@dataclass(frozen=True)
class FlopCount:
    """Forward and backward FLOPs of a model, some of whose components may be frozen."""

    per_token: float
    per_target: float = 0.0
    per_pair: Mapping[int | None, float] = field(default_factory=dict)  # sum over layers, keyed by attention window
    per_place: Mapping[str, float] = field(default_factory=dict)  # keyed by decoder: FLOPs to embed one target
    per_predicted: Mapping[str, float] = field(default_factory=dict)  # keyed by decoder: FLOPs for the loss of a target
    per_pair_ahead: float = 0.0  # sum over layers in which bidirectional tokens attend to later tokens

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
            flops += sum(per_pair * causal_pairs(length, window) for window, per_pair in self.per_pair.items())
        flops += sum(self.per_place.get(name, 0.0) * count for name, count in places.items())
        return flops + sum(self.per_predicted.get(name, 0.0) * count for name, count in predicted.items())


def count_flops(model: nn.Module) -> FlopCount:
    """Return the FLOPs of `model` per token, pair and target."""
    if not isinstance(model, PreTrainedModel):
        return FlopCount(_flops_of([model], is_trained(model)))

    language = language_model(model)
    media = media_model(model)
    recipe = recipe_for(model)

    head_weight = getattr(model.get_output_embeddings(), "weight", None)
    trunk = _run_trunk(model, language, media, head_weight)
    trunk.add(state_flops(language, recipe))
    head = FlopCounter(trunk.trained)
    if head_weight is not None:
        head.multiply(head_weight, 1)

    per_pair: dict[int | None, float] = {}
    for window, layers in attention_windows(language.config).items():
        attention = FlopCounter(trunk.trained)
        attention.attend(layers, attention_width(language.config, recipe))
        per_pair[window] = attention.flops

    embedded: dict[str, float] = {}
    predicted: dict[str, float] = {}
    for port, decoder in media.built_decoders.items():
        embedded[port.modality] = _flops_of(modules_run_by(decoder, "embed"), False)
        predicted[port.modality] = _flops_of(modules_run_by(decoder, "loss"), trunk.trained)

    return FlopCount(
        per_token=trunk.flops,
        per_target=head.flops,
        per_pair=per_pair,
        per_place=embedded,
        per_predicted=predicted,
        per_pair_ahead=_flops_ahead(per_pair, media.bidirectional),
    )


def _flops_ahead(per_pair: Mapping[int | None, float], bidirectional: BidirectionalTokens | None) -> float:
    """Return the FLOPs per pair, summed over the layers in which bidirectional tokens attend to later ones."""
    if bidirectional is None:
        return 0
    if bidirectional.everywhere:
        return sum(per_pair.values())
    return sum(flops for window, flops in per_pair.items() if window is not None)


def _flops_of(modules: Iterable[nn.Module], trained: bool) -> float:
    """Return the FLOPs of modules that run in sequence on one row.

    If `trained`, gradients flow to earlier modules, too.
    """
    counter = FlopCounter(trained)
    for module in modules:
        counter.run(module, 1)
    return counter.flops


def _run_trunk(model: PreTrainedModel, language: PreTrainedModel, media: MediaModel, head: Any) -> FlopCounter:
    """Count the FLOPs of the language model for one token, without its head."""
    # Modules outside the language model run before it, because their features replace embeddings. If one of them is
    # trained, gradients flow through the complete language model.
    inside = {id(parameter) for parameter in (*language.parameters(), head)}
    followers = tuple(f"{module.module}." for module in media.modules_of("follower"))
    outside = [p for name, p in model.named_parameters() if id(p) not in inside and not name.startswith(followers)]
    trunk = FlopCounter(trained=any(parameter.requires_grad for parameter in outside))

    excluded = [f"{name}." for name in frozen_tokenizers(language)]  # decoders count their cost
    if language is model:  # modules that decoders run for each target are counted with the decoders
        excluded += [f"{module.module}." for module in media.modules_of("decoder") if module.module]

    num_experts, experts_per_token = count_experts(language.config)
    for name, parameter, is_multiplied in weights_of(language):
        if name.startswith(tuple(excluded)) or (is_multiplied and parameter is head):
            continue
        if is_multiplied:
            is_expert = "experts" in name.split(".") or (parameter.ndim == 3 and len(parameter) == num_experts)
            trunk.multiply(parameter, experts_per_token / num_experts if num_experts and is_expert else 1)
        trunk.trained |= parameter.requires_grad
    return trunk


def modules_run_by(decoder: Decoder, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
    """Return the modules that a method of a decoder runs per target. By default, `loss` runs all trained modules."""
    if isinstance(decoder, CustomFlops):
        return decoder.modules_run_by(method)
    if method == "embed":
        return []
    return [module for module in decoder.children() if not isinstance(module, Frozen)]


def state_flops(language: PreTrainedModel, recipe: Recipe) -> float:
    """Return the forward FLOPs of all recurrent layers for one token.

    Each multiplication with a state `[key width, value width]` costs 2 * key width * value width FLOPs.
    """
    names = recipe.state_size or recipe_of(language.config.model_type).state_size
    if names is None:
        return 0.0
    heads, rows, columns = (getattr(language.config, name) for name in names)
    return float(sum(2 * products * heads * rows * columns for products in state_products(language)))


def attention_windows(config: PretrainedConfig) -> dict[int | None, float]:
    """Return the number of attention layers, keyed by window. The key None stands for full attention.

    A layer with heads twice as wide as others counts twice.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses_window = getattr(config, "use_sliding_window", True)
        return {getattr(config, "sliding_window", None) if uses_window else None: config.num_hidden_layers}

    fields = config.to_dict()
    layer_configs = fields.get("per_layer_config") or {}
    widths = {int(layer): settings.get("head_dim") for layer, settings in layer_configs.items()}

    sliding_window = getattr(config, "sliding_window", None)
    num_layers = defaultdict[int | None, float](float)
    for layer, kind in enumerate(kinds):
        # A hybrid layer has both attention and a recurrent state.
        has_attention = kind == "hybrid" or ("attention" in kind and "linear" not in kind)
        if has_attention:
            relative_width = (widths.get(layer) or fields["head_dim"]) / fields["head_dim"] if widths else 1
            num_layers[sliding_window if kind.startswith("sliding") else None] += relative_width
    return num_layers


def attention_width(config: PretrainedConfig, recipe: Recipe | None = None) -> float:
    """Return the number of heads times the mean of query-key width and value width.

    `recipe` is the recipe of the complete model.
    """
    names = (recipe and recipe.attention_width) or recipe_of(config.model_type).attention_width
    # Read the mapping, because the attribute cannot be read if layers differ.
    default = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    width = sum(getattr(config, name) for name in names) / 2 if names else default
    return float(config.num_attention_heads * width)
