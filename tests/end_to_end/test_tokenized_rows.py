"""Training on rows that another tool has tokenized equals training on the texts and chats themselves."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from processes import run_omnizoo
from tiny import model_config, read_steps, write_config, write_rows
from transformers import PreTrainedTokenizerFast

import omnizoo
from omnizoo.cli.main import main
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.token_fields import IGNORE_INDEX

Row = dict[str, Any]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenized")
    return write_config(folder, train={"steps": 4, "packs_per_step": 4}, data={"workers": 0})


def tokenized(folder: Path, name: str) -> list[Row]:
    """Return the rows of a file as another tool writes them: token ids and labels of the same length."""
    renderer = Renderer(PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"), append_eos=True)
    rows = []
    for line in (folder / name).read_text().splitlines():
        rendered = renderer.render(json.loads(line))
        rows.append({"input_ids": rendered.input_ids.tolist(), "labels": rendered.columns["labels"].tolist()})
    return rows


def padded(row: Row, length: int, pad: int = 1) -> Row:
    """Return the row padded on the right, as by `padding="max_length"`."""
    num_padding = length - len(row["input_ids"])
    return {
        "input_ids": row["input_ids"] + [pad] * num_padding,
        "labels": row["labels"] + [IGNORE_INDEX] * num_padding,
        "attention_mask": [1] * len(row["input_ids"]) + [0] * num_padding,
    }


def joined(rows: list[Row]) -> Row:
    """Return the rows as one row, as by a tool that packs them."""
    return {name: list(chain.from_iterable(row[name] for row in rows)) for name in ("input_ids", "labels")}


def write_parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=256)  # as the extents of JSONL
    return path


def losses(run: Path) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in read_steps(run)]


def train(config: Path, run: Path, *args: str) -> list[tuple[float, float]]:
    assert main(["train", str(config), "--log.dir", str(run), *args]) == 0
    return losses(run)


@pytest.mark.slow
def test_runs_on_token_ids_equal_runs_on_texts(config: Path, tmp_path: Path) -> None:
    folder = config.parent
    texts = tokenized(folder, "texts.jsonl")
    chats = tokenized(folder, "chats.jsonl")
    longest = max(len(row["input_ids"]) for row in chats)
    held_out = ["--evaluation.every", "2", "--evaluation.packs", "2"]

    def sources(first: Path, second: Path) -> list[str]:
        listed = [{"path": str(first), "weight": 3.0}, {"path": str(second)}]
        return ["--data.sources", json.dumps(listed), "--data.eval_sources", json.dumps([{"path": str(second)}])]

    expected = train(config, tmp_path / "text", *sources(folder / "texts.jsonl", folder / "chats.jsonl"), *held_out)
    jsonl = write_rows(tmp_path / "texts.jsonl", [{"input_ids": row["input_ids"]} for row in texts])
    parquet = write_parquet(tmp_path / "chats.parquet", [padded(row, longest) for row in chats])
    assert train(config, tmp_path / "tokens", *sources(jsonl, parquet), *held_out) == expected
    evaluations = [[step["eval/loss"] for step in read_steps(tmp_path / name)[1::2]] for name in ("text", "tokens")]
    assert evaluations[0] == evaluations[1]
    assert all(evaluations[0])


@pytest.mark.parametrize("boundaries", ["position_ids", "cu_seqlens"])
def test_documents_of_a_packed_row_do_not_attend_to_each_other(config: Path, tmp_path: Path, boundaries: str) -> None:
    """The first step on four documents in one row equals that on the same documents in rows of their own."""
    documents = tokenized(config.parent, "texts.jsonl")[:4]
    lengths = [len(row["input_ids"]) for row in documents]
    packed = joined(documents)
    if boundaries == "position_ids":
        packed["position_ids"] = [position for length in lengths for position in range(length)]
    else:
        packed["cu_seqlens"] = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    one_pack = ["--data.pack_tokens", "1024", "--data.lanes", "1", "--train.packs_per_step", "1"]
    one_pack += ["--data.shuffle", "false"]
    settings = yaml.safe_load(config.read_text())
    settings["train"] = {"epochs": 1, "lr": 3e-3}
    one_epoch = tmp_path / "one_epoch.yaml"
    one_epoch.write_text(yaml.safe_dump(settings))

    def first_step(name: str, rows: list[Row]) -> tuple[float, float]:
        path = write_rows(tmp_path / f"{name}.jsonl", rows)
        sources = ["--data.sources", json.dumps([{"path": str(path)}])]
        (step,) = train(one_epoch, tmp_path / name, *sources, *one_pack)
        return step

    assert first_step("packed", [packed]) == first_step("separate", documents)
    assert first_step("joined", [joined(documents)]) != first_step("separate_again", documents)


@pytest.mark.slow
def test_a_resumed_run_on_packed_rows_is_bit_identical(config: Path, tmp_path: Path) -> None:
    documents = tokenized(config.parent, "texts.jsonl")
    rows = []
    for first in range(0, 300, 3):
        group = documents[first : first + 3]
        rows.append(joined(group) | {"seq_lengths": [len(document["input_ids"]) for document in group]})
    path = write_parquet(tmp_path / "packed.parquet", rows)
    args = ["--data.sources", json.dumps([{"path": str(path)}]), "--train.steps", "6", "--checkpoint.every", "3"]
    whole = train(config, tmp_path / "whole", *args)
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "step_00000003")
    resumed = train(config, tmp_path / "resumed", *args, "--checkpoint.resume", checkpoint)
    assert resumed == whole[3:]


@pytest.mark.slow
def test_new_writes_a_config_for_token_ids_that_trains(config: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"
    settings = dict(model_config("qwen3"))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(model)
    PreTrainedTokenizerFast.from_pretrained(config.parent / "tokenizer").save_pretrained(model)
    data = write_rows(tmp_path / "tokens.jsonl", tokenized(config.parent, "chats.jsonl")[:100])
    new = tmp_path / "first.yaml"
    result = run_omnizoo(["new", model, data, "--out", new])
    assert result.code == 0, result.stderr
    assert "schema: tokenized" in result.stdout
    result = run_omnizoo(["data", "inspect", new, "--samples", "1"])
    assert "tokenized" in result.stdout
    assert "⟦" in result.stdout
    result = run_omnizoo(["train", new, "--log.dir", tmp_path / "run", "--train.steps", "3", "--train.epochs", "null"])
    assert result.code == 0, result.stderr
    assert len(read_steps(tmp_path / "run")) == 3


def test_python_rows_train_and_ids_beyond_the_vocabulary_raise(config: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in tokenized(config.parent, "texts.jsonl")[:50]]
    settings = yaml.safe_load(config.read_text())
    settings["log"]["dir"] = str(tmp_path / "run")
    settings["train"] |= {"steps": 2}
    del settings["data"]["sources"]
    omnizoo.train(settings, data=rows)
    assert len(read_steps(tmp_path / "run")) == 2
    rows[7] = {"input_ids": [5, 6, 100_000]}
    settings["log"]["dir"] = str(tmp_path / "other")
    with pytest.raises(omnizoo.UserError, match=r"row 7: `input_ids` is 100000 at entry 2.*data.on_bad_row"):
        omnizoo.train(settings, data=rows)
