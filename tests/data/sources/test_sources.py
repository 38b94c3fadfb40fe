"""Opening data: every layout gives its rows by number, names them in errors, and says clearly what it cannot read."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.config.errors import UserError
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder, RowSource
from omnizoo.data.sources.jsonl import index_lines
from omnizoo.data.sources.open import open_source
from omnizoo.data.sources.parquet import GroupCache, ParquetFile


def rows(count: int, tag: str = "row") -> list[dict[str, Any]]:
    return [{"text": f"{tag} {i} é🙂"} for i in range(count)]


def write_jsonl(path: Path, values: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
    return path


def write_parquet(path: Path, values: list[dict[str, Any]], group: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), path, row_group_size=group)
    return path


def opened(path: Path, split: str = "train") -> RowSource:
    return open_source(SourceSettings(path=str(path), split=split))


def read_all(source: RowSource) -> list[dict[str, Any]]:
    assert source.extents[0] == 0
    assert source.extents[-1] == len(source)
    assert (np.diff(source.extents) > 0).all()
    backwards = [source.read(i) for i in reversed(range(len(source)))]
    return backwards[::-1]


def test_jsonl_rows_can_be_read_in_any_order(tmp_path: Path) -> None:
    assert read_all(opened(write_jsonl(tmp_path / "a.jsonl", rows(1000)))) == rows(1000)


def test_blank_lines_are_skipped_but_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "one"}\r\n\r\n   \t\n  {"text": "two"}\n\n{"text": "three"}')
    source = opened(path)
    assert [row["text"] for row in read_all(source)] == ["one", "two", "three"]
    assert [source.where(i) for i in range(3)] == [f"{path}:2", f"{path}:5", f"{path}:7"]


@given(
    st.lists(st.sampled_from([b"", b" ", b"x", b"xyz", b"\t\r", b" x "]), max_size=12), st.booleans(), st.integers(1, 9)
)
@settings(max_examples=200, deadline=None)
def test_line_index_matches_plain_python(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends and lines else b""))
    starts, stops, numbers = index_lines(path, chunk_bytes=chunk)
    content = path.read_bytes()
    found = [(content[start:stop], number) for start, stop, number in zip(starts, stops, numbers, strict=True)]
    assert found == [(line, i) for i, line in enumerate(lines, 1) if line.strip()]


def test_malformed_line_is_a_bad_row_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"\n[1]\n{"text": "\xff"}\n')
    source = opened(path)
    assert source.read(0) == {"text": "one"}
    for row, line, reason in ((1, 3, "not valid JSON"), (2, 4, "JSON object"), (3, 5, "not valid JSON")):
        with pytest.raises(BadRow, match=reason):
            source.read(row)
        assert source.where(row) == f"{path}:{line}"


def test_parquet_rows_and_row_groups_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", rows(10), group=4)
    source = opened(path)
    assert read_all(source) == rows(10)
    assert source.extents.tolist() == [0, 4, 8, 10]
    assert source.where(7) == f"{path} row 7"


def test_parquet_cache_keeps_the_newest_groups_within_its_limit(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", rows(30), group=3)
    one_group = pyarrow.parquet.ParquetFile(path).read_row_group(0).nbytes
    cache = GroupCache(limit=int(3.5 * one_group))
    source = ParquetFile(path, MediaFolder(tmp_path, None), cache)
    assert [source.read(i) for i in range(30)] == rows(30)
    assert [group for _, group in cache.tables] == [7, 8, 9]
    assert cache.bytes == sum(table.nbytes for table in cache.tables.values())
    source.read(21)  # group 7 is the newest now
    source.read(0)
    assert [group for _, group in cache.tables] == [9, 7, 0]


def test_messages_in_parquet_are_plain_lists_and_dicts(tmp_path: Path) -> None:
    values = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": False}]}]
    read = read_all(opened(write_parquet(tmp_path / "a.parquet", values)))
    assert read[0]["messages"][1] == {"role": "assistant", "content": "b", "loss": False}


def test_folder_is_read_as_sorted_nested_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b" / "2.jsonl", rows(3, "second"))
    write_parquet(tmp_path / "c.parquet", rows(5, "third"))
    first = write_jsonl(tmp_path / "a.json", rows(2, "first"))
    write_jsonl(tmp_path / ".hidden" / "x.jsonl", rows(1, "hidden"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "README.md").write_text("about")
    source = opened(tmp_path)
    assert read_all(source) == rows(2, "first") + rows(3, "second") + rows(5, "third")
    assert source.where(1) == f"{first}:2"
    assert source.where(4) == f"{tmp_path / 'b' / '2.jsonl'}:3"
    assert source.where(9) == f"{tmp_path / 'c.parquet'} row 4"


def test_folder_with_several_splits_gives_the_selected_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows(2, split))
    assert read_all(opened(tmp_path)) == rows(2, "train")
    assert read_all(opened(tmp_path, "test")) == rows(2, "test")
    with pytest.raises(UserError, match="has the splits test, train, not 'validation'"):
        opened(tmp_path, "validation")


def test_folder_with_a_single_split_is_read_completely(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "contrastive.jsonl", rows(1))
    write_jsonl(tmp_path / "eval.jsonl", rows(2))
    assert len(opened(tmp_path)) == 3


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_saved_dataset_and_dataset_dict_are_read(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(rows(4))
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(tmp_path / "both")
    assert read_all(opened(tmp_path / "one")) == rows(4)
    assert read_all(opened(tmp_path / "both")) == rows(4)
    assert read_all(opened(tmp_path / "both", "test")) == rows(4)[1:2]
    assert opened(tmp_path / "one").where(2) == f"{tmp_path / 'one'} row 2"
    with pytest.raises(UserError, match="split 'validation'"):
        opened(tmp_path / "both", "validation")


@pytest.mark.usefixtures("hf_cache")
def test_other_local_formats_are_read_through_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.csv").write_text("text\none\ntwo\n")
    for name in ("a.csv", "a.txt", "a.json", "a.jsonl.gz", "folder"):
        assert read_all(opened(tmp_path / name)) == [{"text": "one"}, {"text": "two"}], name


@pytest.mark.usefixtures("hf_cache")
def test_unreadable_sources_raise_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl: .*does not exist"):
        opened(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty\.jsonl: .*no rows"):
        opened(tmp_path / "empty.jsonl")
    write_parquet(tmp_path / "empty.parquet", rows(1)[:0])
    with pytest.raises(UserError, match=r"empty\.parquet: .*no rows"):
        opened(tmp_path / "empty.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"broken\.parquet: not a readable Parquet file"):
        opened(tmp_path / "broken.parquet")
    (tmp_path / "model.pkl").write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"unknown file type '\.pkl'"):
        opened(tmp_path / "model.pkl")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="nothing: not a JSONL, CSV, Parquet or tar"):
        opened(tmp_path / "nothing")
