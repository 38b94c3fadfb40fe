"""Plugin models with one leak each, and a model with dropout, for tests of the probe."""

from types import SimpleNamespace
from typing import Any

import torch
from own_module import TinyModel
from torch import nn


class SeesLaterTokens(TinyModel):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        peek = input_ids.roll(-1, 1)
        last = (kwargs["cu_seq_lens_q"][1:] - 1).long()
        peek[:, last] = input_ids[:, last]  # do not cross the end of the sample
        kept = kwargs["logits_to_keep"]
        out = super().forward(input_ids, **kwargs)
        return SimpleNamespace(logits=out.logits + self.head(self.tokens(peek))[:, kept])


class MixesSamples(TinyModel):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        out = super().forward(input_ids, **kwargs)
        mean = self.tokens(input_ids).cumsum(1)[:, kwargs["logits_to_keep"]]
        return SimpleNamespace(logits=out.logits + self.head(0.1 * mean))


class CountsFromThePacksBeginning(TinyModel):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        return super().forward(input_ids, torch.arange(input_ids.shape[1])[None], **kwargs)


class DropsOut(TinyModel):
    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> SimpleNamespace:
        out = super().forward(input_ids, **kwargs)
        return SimpleNamespace(logits=self.dropout(out.logits))
