"""A custom model: a small GPT in plain torch. OmniZoo parallelizes it; this file has no distributed code.

    PYTHONPATH=examples/own_module omnizoo train examples/text_tiny.yaml --model.module gpt:GPT \\
        --model.config '{vocabulary: 512, width: 128, heads: 4, layers: 4}' --nproc 2

From Python, `omnizoo.train(config, model=GPT(...))` trains an object, starting from its weights. OmniZoo calls a model
like a Hugging Face model. The model needs three things:

- `_no_split_modules` names the block classes, the unit of FSDP sharding.
- Attention calls `omnizoo.attend` with the keyword arguments of forward. It keeps the samples of a pack apart and works
  with sequence parallelism.
- Logits are computed only at the positions in `logits_to_keep`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import omnizoo


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x: torch.Tensor, **pack: Any) -> torch.Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)  # [1, heads, tokens, head_dim]
        x = x + self.out(omnizoo.attend(query, key, value, **pack).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, longest: int = 2048) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **pack: Any
    ) -> SimpleNamespace:
        """Return the logits. `input_ids` and `position_ids` are [1, tokens]; positions restart in each sample."""
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, **pack)
        return SimpleNamespace(logits=self.head(self.last(x[:, logits_to_keep])))
