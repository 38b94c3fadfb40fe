"""A minimal language model as a plugin, for tests of `model.module` and `omnizoo verify`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import omnizoo


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(omnizoo.attend(q, k, v, **kwargs).reshape(x.shape))
        return x + self.mlp(x)


class TinyModel(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, vocab_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **kwargs: Any
    ) -> SimpleNamespace:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, **kwargs)
        return SimpleNamespace(logits=self.head(x[:, logits_to_keep]))
