"""FLOPs of a diffusion transformer, as torch counts them on the meta device.

The FLOPs are a quadratic polynomial of the tokens of the latents and of the text, because only attention multiplies
tokens with tokens. So a few counts at small sizes determine them for every size.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from omnizoo.modalities.flop_count import is_trained
from omnizoo.modalities.item import MediaSize
from omnizoo.models.diffusion.denoiser import build_transformer, condition_shapes, config_of_denoiser, latent_tokens
from omnizoo.models.diffusion.predict import predict
from omnizoo.models.diffusion.recipe import Config, diffusion_recipe_of

# (rows of patches, columns of patches, text tokens) of the counts. Some models expect at least 512 text tokens.
SIZES = ((4, 8, 512), (8, 8, 512), (8, 12, 512), (4, 8, 576), (4, 8, 768), (8, 8, 576))
LINEAR_OPS = ("addmm", "mm", "convolution")  # multiply with weights; the others multiply tokens with tokens


@dataclass(frozen=True)
class DenoiserFlops:
    """Coefficients of the FLOPs of one forward pass: of 1, L, T, L L, L T and T T, for L and T tokens."""

    linear: tuple[float, ...]  # products with weights
    attention: tuple[float, ...]

    def forward(self, tokens: int, text_tokens: int) -> tuple[float, float]:
        """Return the FLOPs of a forward pass for one sample: products with weights, and attention."""
        terms = _terms(tokens, text_tokens)
        return float(np.dot(self.linear, terms)), float(np.dot(self.attention, terms))


class SampleFlops:
    """Counts the FLOPs of forward and backward for one sample, without recomputation.

    Args:
        model: The transformer or pair of experts; it may be sharded. A sample visits one expert.
    """

    def __init__(self, model: nn.Module) -> None:
        config = config_of_denoiser(model)
        self._recipe = diffusion_recipe_of(config["_class_name"])
        self._flops = denoiser_flops(config)
        is_base_trained = any(
            p.requires_grad and p.ndim > 1 and "lora_" not in name for name, p in model.named_parameters()
        )
        self._factors = (1, 1)  # forward and backward / forward, for products with weights and for attention
        if is_trained(model):
            self._factors = (3 if is_base_trained else 2, 3)

    def of(self, size: MediaSize, length: int) -> tuple[float, float]:
        """Return the FLOPs of products with weights, and of attention.

        Args:
            size: The size of the item. Its placeholders are the tokens of the latents.
            length: Number of tokens of latents and text.
        """
        tokens = self._recipe.padded(size.num_placeholders)
        text_tokens = self._recipe.padded(length - size.num_placeholders)
        linear, attention = self._flops.forward(tokens, text_tokens)
        return linear * self._factors[0], attention * self._factors[1]


def sample_flops(model: nn.Module, latent_shape: Sequence[int], text_tokens: int) -> float:
    """Return the FLOPs of forward and backward for one sample, without recomputation.

    Args:
        model: The transformer or pair of experts; it may be sharded.
        latent_shape: Shape of the latents, `[C, F, H, W]` or `[C, H, W]`.
        text_tokens: Number of text tokens.
    """
    tokens = latent_tokens(config_of_denoiser(model), latent_shape)
    return sum(SampleFlops(model).of(MediaSize(num_placeholders=tokens, cost=0.0), tokens + text_tokens))


def denoiser_flops(config: Config) -> DenoiserFlops:
    """Return the FLOPs of the transformer that `config` (with `_class_name`) describes."""
    return _fit(json.dumps(dict(config), sort_keys=True, default=list))


@cache
def _fit(config_json: str) -> DenoiserFlops:
    """Count the FLOPs at a few sizes, and determine the coefficients."""
    config = json.loads(config_json)
    recipe = diffusion_recipe_of(config["_class_name"])
    model = build_transformer(config, "model", "meta")
    depth, rows, columns = recipe.patch(config)
    terms: list[npt.NDArray[np.float64]] = []
    counts = []
    required = recipe.fixed_text_tokens(config)
    sizes = SIZES if required is None else [(height, width, required) for height, width, _ in SIZES[:3]]
    for height, width, text_tokens in sizes:
        shape = (recipe.channels(config), depth, height * rows, width * columns)
        terms.append(_terms(recipe.padded(latent_tokens(config, shape)), recipe.padded(text_tokens)))
        counts.append(_count(model, config, shape, text_tokens))
    unknown = slice(None) if required is None else [0, 1, 3]  # terms that do not depend on the text
    coefficients = np.zeros((len(terms[0]), 2))
    coefficients[unknown] = np.linalg.solve(np.stack(terms)[:, unknown], np.array(counts, np.float64)).round()
    return DenoiserFlops(linear=tuple(coefficients[:, 0]), attention=tuple(coefficients[:, 1]))


def _terms(tokens: int, text_tokens: int) -> npt.NDArray[np.float64]:
    """Return the terms of the polynomial."""
    latents, text = float(tokens), float(text_tokens)
    return np.array([1.0, latents, text, latents * latents, latents * text, text * text])


def _count(model: Any, config: Config, shape: Sequence[int], text_tokens: int) -> tuple[float, float]:
    """Return torch's count for one sample on meta: products with weights, and attention."""
    from torch.utils.flop_counter import FlopCounterMode  # imported here because it imports triton

    recipe = diffusion_recipe_of(str(config["_class_name"]))
    condition = {}
    for name, condition_shape in condition_shapes(config, shape, text_tokens).items():
        condition[name] = torch.zeros(1, *condition_shape, device="meta")
    noisy = torch.zeros(1, *shape, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        predict(model, recipe, noisy, torch.zeros(1, device="meta"), condition)
    by_operator: Mapping[Any, int] = counter.get_flop_counts()["Global"]
    linear = 0
    for operator, flops in by_operator.items():
        if str(operator).removeprefix("aten.") in LINEAR_OPS:
            linear += flops
    return float(linear), float(counter.get_total_flops() - linear)
