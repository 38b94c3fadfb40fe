"""Rows of a user's own, as `data.sources: [{rows: ...}]` names them in tests."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

import omnizoo


def make(count: int = 60, word: str = "square") -> list[dict[str, Any]]:
    return [{"text": f"the {word} of {i} is {i * i}"} for i in range(count)]


def stream(count: int = 60) -> Iterator[dict[str, Any]]:
    yield from make(count)


def endless() -> Iterator[dict[str, Any]]:
    while True:
        yield {"text": "on and on"}


def fails() -> list[dict[str, Any]]:
    raise RuntimeError("no disk")


class ByNumber(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> dict[str, Any]:
        return make()[row]


class OneByOne(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return stream()


class Source(omnizoo.RowSource):
    def __init__(self, count: int = 60) -> None:
        self.rows = make(count)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> dict[str, Any]:
        if row == 13 and len(self.rows) == 61:
            raise omnizoo.BadRow("it brings bad luck")
        return self.rows[row]


class NoRead(omnizoo.RowSource):
    def __len__(self) -> int:
        return 3


class Model(torch.nn.Module):
    """Called otherwise than models are."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(512, 8)
        self.head = torch.nn.Linear(8, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


class NoLogits(Model):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.head(self.table(input_ids))
