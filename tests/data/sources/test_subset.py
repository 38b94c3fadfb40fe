"""`take`: one file for training and for held-out data, no row in both."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_config, write_rows

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.row import Row
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.data.sources.subset import RowSubset


class Numbers(RowSource):
    def __init__(self, count: int, cuts: list[int]) -> None:
        self.count = count
        self.extents = np.unique([0, *(cut % (count + 1) for cut in cuts), count])

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> Row:
        return {"row": row}


@given(st.integers(0, 300), st.integers(2, 60), st.lists(st.integers(0, 300), max_size=8))
def test_subset_and_its_complement_contain_each_row_once(count: int, every: int, cuts: list[int]) -> None:
    whole = Numbers(count, cuts)
    held = RowSubset(whole, f"every {every}th")
    others = RowSubset(whole, f"all but every {every}th")
    rows = [[part.read(i)["row"] for i in range(len(part))] for part in (held, others)]
    assert sorted(rows[0] + rows[1]) == list(range(count))
    assert all(part == sorted(part) for part in rows)
    assert len(held) == count // every
    for part in (held, others):
        assert part.extents[0] == 0
        assert part.extents[-1] == len(part)
        assert (np.diff(part.extents) > 0).all()
        # Rows that are stored together are read together.
        for first, last in zip(part.extents[:-1], part.extents[1:], strict=True):
            inside = [part.read(i)["row"] for i in range(first, last)]
            assert len({int(np.searchsorted(whole.extents, row, side="right")) for row in inside}) == 1


def test_take_selects_rows_that_keep_their_line_numbers(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(10)])
    held = open_source(SourceSettings(path=str(path), take="every 5th"))
    assert [held.read(i)["text"] for i in range(len(held))] == ["4", "9"]
    assert held.where(0).endswith("a.jsonl:5")
    assert content_of(held) == content_of(
        open_source(SourceSettings(path=str(path)))
    )  # of the file; `take` is told beside it
    with pytest.raises(UserError, match=r"every 50th selects none of the 10 rows"):
        open_source(SourceSettings(path=str(path), take="every 50th"))


@pytest.mark.parametrize("take", ["half", "every 0th", "every 1st", "all but every 1st", "every 5"])
def test_invalid_take_prints_one_line(take: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    sources = json.dumps([{"path": str(tmp_path / "texts.jsonl"), "take": take}])
    assert main(["data", "inspect", str(config), "--data.sources", sources]) == 2
    error = capsys.readouterr().err
    assert "every 50th" in error or "from 2" in error
    assert error.count("\n") == 1
