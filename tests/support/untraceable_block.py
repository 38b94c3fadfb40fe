"""A model whose blocks cannot be compiled because of data-dependent control flow."""

from typing import Any

import torch
from own_module import Block, TinyModel
from torch import nn


class Doubtful(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = super().forward(x, **kwargs)
        return x * 2 if x.abs().mean() > 1 else x


class DoubtfulModel(TinyModel):
    _no_split_modules = ("Doubtful",)

    def __init__(self, vocab_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__(vocab_size, width, heads, layers)
        self.blocks = nn.ModuleList(Doubtful(width, heads) for _ in range(layers))
