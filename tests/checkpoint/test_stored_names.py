"""Names inside checkpoints and run folders stay the same when classes, functions and config keys are renamed."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import write_config

from omnizoo.config.load import load_config
from omnizoo.config.sections.data import SourceSettings
from omnizoo.data.loading import resume_check
from omnizoo.data.loading.fingerprint import content_of
from omnizoo.data.loading.lanes import Counters
from omnizoo.data.loading.reader import build_reader
from omnizoo.data.sources import csv_tsv, hf_datasets, jsonl, parquet, python_rows, webdataset
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.callbacks.build import watchers
from omnizoo.training.callbacks.dispatcher import Callbacks
from omnizoo.training.recompute_budget import conditions

KINDS: dict[type[RowSource], str] = {
    jsonl.JsonlFile: "JsonLines",
    jsonl.JsonArrayFile: "JsonArray",
    csv_tsv.CsvFile: "CsvRows",
    webdataset.WebDatasetFile: "TarSamples",
    parquet.ParquetFile: "ParquetRows",
    hf_datasets.HFDataset: "DatasetRows",
    python_rows.PythonRows: "GivenRows",
    python_rows.UserRows: "OwnRows",
}
FINGERPRINT = {
    *("data.lanes", "data.pack_tokens", "data.look_ahead", "data.shuffle", "data.shuffle_rows", "data.append_eos"),
    *("data.min_targets", "data.overlong", "data.overlong of chats", "train.epochs", "train.seed"),
    *("train.global_batch", "model.modalities", "model.tokenizer", "sources"),
    "what train.losses makes of preference pairs",
    "what train.losses makes of single answers",
}
SOURCE = {"path", "weight", "split", "media_dir", "rows", "bytes", "shape", "content"}
TOKENIZER = {
    *("its vocabulary", "its special tokens", "its chat template", "its definition", "library"),
    "its preprocessing of media",
}
COUNTERS = [
    *("packs", "skipped_rows", "dropped_overlong", "split_overlong", "truncated_overlong", "few_targets"),
    "beyond_positions",
]


def test_each_kind_of_source_keeps_its_stored_name() -> None:
    assert {kind: kind.stored_kind for kind in KINDS} == KINDS


@pytest.mark.parametrize(
    ("name", "text", "shape"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": "bc"}\n', "8bd3d20af8c61dd7fc27dfb3040a1964"),
        ("rows.json", '[{"text": "a"}, {"text": "bc"}]', "c015c4a3c54588e2b57536287a7edce9"),
        ("rows.csv", "text\na\nbc\n", "959e570c214abf8f0809d1b967db690e"),
    ],
)
def test_hashes_of_sources_are_those_of_earlier_checkpoints(tmp_path: Path, name: str, text: str, shape: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert content_of(open_source(SourceSettings(path=str(path))))["shape"] == shape


def test_fingerprint_keeps_its_keys(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    stored = resume_check.fingerprint(build_reader(config, load_tokenizer(config.model)))
    assert stored.keys() == FINGERPRINT
    assert stored["sources"][0].keys() == SOURCE
    assert stored["model.tokenizer"].keys() == TOKENIZER
    assert resume_check.FORMAT_KEYS == ("format", "columns", "json_columns", "take", "untagged_media")
    assert [field.name for field in fields(Counters)] == COUNTERS


def test_states_of_callbacks_keep_their_keys(tmp_path: Path) -> None:
    data: dict[str, Any] = {"eval_sources": [{"path": "held_out.jsonl"}]}
    evaluation = {"every": 1, "early_stop": {"patience": 2}}
    config = load_config(write_config(tmp_path, data=data, evaluation=evaluation, checkpoint={"best": "eval/loss"}))
    callbacks = Callbacks(watchers(config, "run"), active=True)
    stored = {
        "checkpoint.best": {"metric": "eval/loss", "value": 2.5, "step": 3},
        "train.early_stop": {"metric": "eval/loss", "best": 2.5, "waited": 1},
    }
    callbacks.load_state_dict(stored)
    assert callbacks.state_dict() == stored


def test_conditions_of_a_recompute_budget_keep_their_text(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, parallel={"recompute": {"budget": 0.5}}))
    text = conditions(config, cast(Mesh, SimpleNamespace(layout="layout")))
    assert text == "layout, fp32, 96 tokens x 1, tiles None, budget 0.5"
