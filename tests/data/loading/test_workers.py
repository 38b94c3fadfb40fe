"""What loader workers are given, and how they are started: never by a fork of a process with threads."""

import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import make_tokenizer
from own_rows import make
from processes import Forked
from transformers import PreTrainedTokenizerFast

from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import PythonObject
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.train import TrainSection
from omnizoo.data.loading.loader import Loader, build_loader
from omnizoo.data.loading.worker_pickling import LARGE, NotPicklable, SharedPickle
from omnizoo.data.sources.base import RowSource
from omnizoo.training.setup import build_bundle

ROOT = Path(__file__).parents[3]
PUBLISHED = sorted((ROOT / "examples" / "published").glob("*.yaml"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def loader_of(source: SourceSettings, tokenizer: PreTrainedTokenizerFast, workers: int) -> Loader:
    data = DataSection(sources=[source], pack_tokens=64, lanes=4, workers=workers)
    config = Config(model=ModelSection(config={"model_type": "llama"}), data=data, train=TrainSection(packs_per_step=8))
    return build_loader(config, tokenizer, 0, 1)


def ids_of(loader: Loader) -> list[list[int]]:
    ids = [pack.columns["input_ids"].tolist() for _ in range(2) for pack in loader.next_step().packs]
    loader.close()
    return ids


class Locked(RowSource):
    """It holds what no other process can be given."""

    def __init__(self, count: int = 60) -> None:
        self.rows = make(count)
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> dict[str, Any]:
        with self.lock:
            return self.rows[row]


def test_rows_that_cannot_be_pickled_are_read_without_workers(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    given = SourceSettings(given=PythonObject(Locked(), "data="))
    expected = ids_of(loader_of(given, tokenizer, 0))
    with caplog.at_level(logging.WARNING):
        loader = loader_of(given, tokenizer, 2)
        assert ids_of(loader) == expected
    (warning,) = [record.getMessage() for record in caplog.records if "data.workers" in record.getMessage()]
    assert warning.startswith("data.workers: using 0 instead of 2")
    assert "lock" in warning
    assert loader.workers == 0


def test_each_worker_creates_the_rows_that_the_config_names(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    named = SourceSettings(rows="test_workers:Locked", options={"count": 50})
    loader = loader_of(named, tokenizer, 2)
    assert ids_of(loader) == ids_of(loader_of(named, tokenizer, 0))
    assert loader.workers == 2
    assert "data.workers" not in caplog.text


def test_loader_starts_workers_after_its_reader_rendered_chats(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a square"}]
    chats = SourceSettings(given=PythonObject([{"messages": turns}] * 9, "data="))
    loader = loader_of(chats, tokenizer, 1)
    loader.reader.renderer.render({"messages": turns})  # as when rows are measured before the run
    assert ids_of(loader) == ids_of(loader_of(chats, tokenizer, 0))
    assert loader.workers == 1


def test_large_arrays_are_memory_mapped_and_small_ones_pickled() -> None:
    rows = np.arange(LARGE, dtype=np.int64)
    value = {"rows": rows, "few": rows[:3], "half": torch.randn(LARGE).bfloat16(), "every_other": rows[::2]}
    handover = SharedPickle(value)
    assert [size for _, size in handover.spans] == [rows.nbytes, 2 * LARGE, rows.nbytes // 2]
    assert len(handover.pickled) < 2000
    found = handover.open()
    assert all((found[name] == value[name]).all() for name in value)
    assert found["half"].dtype == torch.bfloat16
    found["rows"][0] = 7  # its own page
    assert handover.open()["rows"][0] == 0


def test_pickling_a_lambda_raises_with_its_name() -> None:
    with pytest.raises(NotPicklable, match="lambda"):
        SharedPickle({"rows": lambda: 1})


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_reader_of_each_published_family_can_be_pickled(path: Path) -> None:
    reader = build_bundle(load_config(path)).reader()
    found = SharedPickle(reader).open()
    assert list(found.modalities) == list(reader.modalities)
    assert (found.renderer.positions is None) == (reader.renderer.positions is None)


SCRIPT = """
import sys
from transformers import AutoTokenizer
from omnizoo.config.sections.data import SourceSettings
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import PythonObject
from omnizoo.data.loading.loader import build_loader

class Rows(list):
    pass

print("running", flush=True)
config = Config.model_validate_json(sys.argv[1])
own = SourceSettings(given=PythonObject(Rows({"text": f"row {i}"} for i in range(9)), "data="))
for sources in (config.data.sources, [own]):
    data = config.data.model_copy(update={"sources": sources, "workers": 2})
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    loader = build_loader(config.model_copy(update={"data": data}), tokenizer, 0, 1)
    loader.next_step()
    print(loader.workers, flush=True)
    loader.close()
"""


@pytest.mark.slow
def test_workers_do_not_run_a_script_without_main_guard_again(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    script = tmp_path / "script.py"
    file.write_text("".join(json.dumps(row) + "\n" for row in make()))
    script.write_text(SCRIPT)
    config = loader_of(SourceSettings(path=str(file)), tokenizer, 0).config.model_dump_json()
    result = Forked([sys.executable, str(script), config, tokenizer.name_or_path], {}).wait(240)
    assert result.stdout.split() == ["running", "2", "0"], result.stderr
    assert "Rows is defined in the main script" in result.stderr
