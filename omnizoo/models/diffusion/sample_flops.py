"""FLOPs of training a diffusion transformer on a sample.

torch counts the forward pass of the class on the meta device, for a few small samples. The FLOPs of a transformer are a
polynomial of second degree in the number of tokens, which these counts determine exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from omnizoo.modalities.flop_count import weights_of
from omnizoo.modalities.frozen_tokenizer import diffusers_package
from omnizoo.modalities.item import MediaSize
from omnizoo.models.diffusion.denoiser import CLASS, condition_shapes, latent_channels
from omnizoo.models.diffusion.expert_pair import ExpertPair
from omnizoo.models.diffusion.predict import predict
from omnizoo.models.diffusion.recipe import DiffusionRecipe, denoiser_recipe

POINTS = ((2, 4), (4, 4), (6, 4), (2, 8), (4, 8), (2, 12))  # patches per row, and text tokens, of the counted samples
ATTENTION = ("bmm", "baddbmm", "_scaled_dot_product")  # names of operators that multiply activations with each other

Coefficients = npt.NDArray[np.float64]  # [6], see `_powers`


@dataclass(frozen=True)
class SampleFlops:
    """Forward FLOPs of a sample as a function of its tokens, and the cost of backward relative to forward.

    Adapter matrices are not counted.
    """

    linear: Coefficients  # of products with weights
    attention: Coefficients  # of products of activations
    linear_factor: float  # forward and backward FLOPs / forward FLOPs
    attention_factor: float

    @classmethod
    def of(cls, model: nn.Module) -> "SampleFlops | None":
        """Return the FLOPs of a diffusion transformer, which may be sharded; None for any other model."""
        recipe = denoiser_recipe(model)
        if recipe is None:
            return None
        transformer: Any = model.transformer if isinstance(model, ExpertPair) else model
        class_name = type(transformer).__name__.removeprefix("FSDP")
        transformer_class = getattr(diffusers_package(class_name), class_name)
        config = dict(transformer.config) | {CLASS: class_name}
        with torch.device("meta"):
            copy = transformer_class.from_config(config)

        powers = []
        counts = []
        for patches, text_tokens in POINTS:
            powers.append(_powers(patches, text_tokens))
            counts.append(_count(copy, recipe, config, patches, text_tokens))
        linear, attention = np.linalg.solve(np.array(powers), np.array(counts)).T

        weights = [parameter for _, parameter, is_multiplied in weights_of(model) if is_multiplied]
        num_trained = sum(weight.numel() for weight in weights if weight.requires_grad)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        return cls(
            linear=linear,
            attention=attention,
            linear_factor=1.0 + is_trained + num_trained / max(1, sum(weight.numel() for weight in weights)),
            attention_factor=3.0 if is_trained else 1.0,
        )

    def of_sample(self, size: MediaSize, length: int) -> float:
        """Return the forward and backward FLOPs of a sample.

        Args:
            size: The size of its item.
            length: Number of tokens of latents and text.
        """
        powers = np.array(_powers(size.num_placeholders, length - size.num_placeholders))
        return float(self.linear_factor * (self.linear @ powers)) + self.attention_of_sample(size, length)

    def attention_of_sample(self, size: MediaSize, length: int) -> float:
        """Return the part of `of_sample` that multiplies activations with each other."""
        powers = np.array(_powers(size.num_placeholders, length - size.num_placeholders))
        return float(self.attention_factor * (self.attention @ powers))


def _powers(latent_tokens: int, text_tokens: int) -> list[float]:
    """Return the terms of a polynomial of second degree in two numbers."""
    x, y = float(latent_tokens), float(text_tokens)
    return [1.0, x, y, x * x, x * y, y * y]


def _count(
    model: nn.Module, recipe: DiffusionRecipe, config: Mapping[str, Any], patches: int, text_tokens: int
) -> tuple[float, float]:
    """Return the forward FLOPs of products with weights and of products of activations, for one row of patches."""
    from torch.utils.flop_counter import FlopCounterMode  # imported here because it imports triton

    frames, height, width = recipe.patch(config)
    sides = (height, patches * width) if recipe.dims == 2 else (frames, height, patches * width)
    shape = (latent_channels(config), *sides)
    condition = {}
    for name, size in condition_shapes(config, shape, text_tokens).items():
        condition[name] = torch.zeros(1, *size, device="meta")
    noisy = torch.zeros(1, *shape, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        predict(model, recipe, noisy, torch.full((1,), 0.5, device="meta"), condition)
    linear = attention = 0.0
    for operator, flops in counter.get_flop_counts()["Global"].items():
        is_attention = any(name in str(operator) for name in ATTENTION)
        attention += flops * is_attention
        linear += flops * (not is_attention)
    return linear, attention
