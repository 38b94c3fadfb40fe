"""Shared pieces of data/loading/test_lanes.py and other tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omnizoo.config.schema import Config
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.train import TrainSection
from omnizoo.data.loading.reader import Reader
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow, Row
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import Rows, RowSource
from omnizoo.data.token_fields import make_columns


@dataclass
class Numbers(RowSource):
    """A source of rows that are their own number."""

    extents: Rows
    bad: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return int(self.extents[-1])

    def read(self, row: int) -> Row:
        if row in self.bad:
            raise BadRow("bad on purpose")
        return {"number": row}

    def find(self, row: int, name: str) -> bytes:
        raise AssertionError("numbers have no media")

    def where(self, row: int) -> str:
        return f"numbers:{row + 1}"


class NumberRenderer(Renderer):
    """Row n as n % 7 + 1 tokens (or as many as told), all of them n."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def render_samples(self, row: Row, *context: Any) -> list[RenderedRow]:
        number = row["number"]
        length = self.length or number % 7 + 1
        ids = np.full(length, number)
        return [RenderedRow(make_columns(input_ids=ids, labels=ids), is_prose=True)]


def numbers(*extents: int, bad: frozenset[int] = frozenset()) -> Numbers:
    return Numbers(np.cumsum([0, *extents]), bad)


def data(weights: list[float], **options: Any) -> DataSection:
    return DataSection(sources=[SourceSettings(path=f"source{i}", weight=w) for i, w in enumerate(weights)], **options)


def reader_of(
    data: DataSection, sources: Sequence[Any], renderer: Renderer, seed: int, most_positions: int | None = None
) -> Reader:
    config = Config(model=ModelSection(config={"model_type": "llama"}), data=data, train=TrainSection(seed=seed))
    return Reader(config, sources, renderer, {}, most_positions)
