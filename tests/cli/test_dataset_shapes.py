"""`omnizoo new` writes configs that train without edits for the rows of common datasets."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from dataset_shapes import NUM_ROWS, SHAPES, Shape
from model_folders import model_folder

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.data.loading.reader import build_reader
from omnizoo.models.chat_tokenizer import load_chat_tokenizer

ROOT = Path(__file__).parents[2]
PLAIN = SHAPES[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the folder of a small model, which is saved once."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = model_folder(kind, tmp_path_factory.mktemp("model") / kind)
            if kind == "text":  # rows with tools are longer than the positions of the smallest model
                file = folders[kind] / "config.json"
                file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2048}))
        return folders[kind]

    return folder_of


def new_config(shape: Shape, models: Any, folder: Path, *arguments: str) -> Path:
    """Run `omnizoo new` and return the written config."""
    out = folder / "first.yaml"
    data = shape.write(folder / "dataset")
    assert main(["new", str(models(shape.model)), str(data), "--out", str(out), *shape.command, *arguments]) == 0
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_new_knows_the_shape(shape: Shape, models: Any, tmp_path: Path) -> None:
    out = new_config(shape, models, tmp_path)
    config = yaml.safe_load(out.read_text())
    assert load_config(out)
    assert "CHOOSE" not in out.read_text()
    source = config["data"]["sources"][0]
    expected = dict(shape.source)
    if "media_dir" in expected:
        expected["media_dir"] = str((tmp_path / "dataset" / expected["media_dir"]).resolve())
        source["media_dir"] = str(Path(source["media_dir"]).resolve())
    assert {key: value for key, value in source.items() if key not in ("path", "take")} == expected
    assert set(config["data"].get("ignore", [])) == set(shape.ignore)
    assert [loss["kind"] for loss in config["train"].get("losses", [])] == [shape.loss] * bool(shape.loss)
    assert ("chat_template" in config["data"]) == shape.template


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shape_trains_evaluates_and_exports(shape: Shape, models: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--train.steps", "3", "--log.dir", str(run), "--data.workers", "0", "--evaluation.samples", "0"]
    out = new_config(shape, models, tmp_path, *settings)
    assert main(["train", str(out)]) == 0
    steps = (run / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 3
    assert main(["eval", str(run)]) == 0
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported/config.json").is_file()


CALL = '{"name": "search_recipes", "arguments": {"ingredients": ["rice", "0"]}}'
LEARNED = {
    "LLaMA-Factory glaive_toolcall": [
        f"<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "I found one recipe.<|im_end|>",
    ],
    "LLaMA-Factory reason_tool_use": [
        f"<think>\nSearch 0.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
        "<think>\nOne result.\n</think>\n\nI found one.<|im_end|>",
    ],
}


@pytest.mark.parametrize("name", LEARNED)
def test_written_chat_template_trains_calls_and_reasoning(name: str, models: Any, tmp_path: Path) -> None:
    (shape,) = [shape for shape in SHAPES if shape.name == name]
    config = load_config(new_config(shape, models, tmp_path))
    tokenizer = load_chat_tokenizer(config)
    rendered = build_reader(config, tokenizer).renderer.render(shape.row(0))
    ids, is_target = rendered.input_ids, rendered.is_target
    starts = [i for i in range(1, len(ids)) if is_target[i] and not is_target[i - 1]]
    texts = []
    for start in starts:
        stop = next((i for i in range(start, len(ids)) if not is_target[i]), len(ids))
        texts.append(tokenizer.decode(ids[start:stop]))
    assert texts == LEARNED[name]


def test_base_model_gets_a_chat_template_that_ends_turns_with_its_eos(models: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(models("text"), tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("<|im_start|>", "<|one|>").replace("<|im_end|>", "<|two|>"))
    data = PLAIN.write(tmp_path)
    out = tmp_path / "a.yaml"
    assert main(["new", str(folder), str(data), "--out", str(out)]) == 0
    config = load_config(out)
    assert config.data.chat_template == str(tmp_path / "a_template.jinja")
    tokenizer = load_chat_tokenizer(config)
    rendered = build_reader(config, tokenizer).renderer.render(PLAIN.row(0))
    assert tokenizer.decode(rendered.input_ids[rendered.is_target]) == "1. Eat well." + tokenizer.eos_token


def test_existing_file_is_not_overwritten_by_a_chat_template(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shape,) = [shape for shape in SHAPES if shape.name in LEARNED][:1]
    (tmp_path / "a_template.jinja").write_text("mine")
    data = shape.write(tmp_path / "dataset")
    assert main(["new", str(models("text")), str(data), "--out", str(tmp_path / "a.yaml")]) == 2
    assert "a_template.jinja already exists" in capsys.readouterr().err
    assert (tmp_path / "a_template.jinja").read_text() == "mine"


def test_reference_lists_the_tested_shapes() -> None:
    text = (ROOT / "docs/reference/rows.md").read_text()
    section = text.partition("## Datasets that `omnizoo new` knows")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [shape.name for shape in SHAPES]  # the first row is the header


def test_overrides_are_written_to_the_config(models: Any, tmp_path: Path) -> None:
    arguments = ["--train.steps", "7", "--train.lr=1e-5", "--data.sources.0.format", "alpaca", "--data.pack_tokens"]
    arguments += ["128", "--checkpoint.best", "null", "--model.adapter.rank", "4", "--evaluation.samples", "2"]
    out = new_config(PLAIN, models, tmp_path, *arguments)
    config = load_config(out)
    assert (config.train.steps, config.train.epochs, config.train.lr) == (7, None, 1e-5)
    assert config.data.sources[0].format == config.data.eval_sources[0].format == "alpaca"
    assert config.data.pack_tokens == 128
    assert config.checkpoint.best is None
    assert config.model.adapter is not None
    assert config.model.adapter.rank == 4
    assert config.evaluation.samples == 2
    assert "from the command line" in out.read_text()


def test_override_of_format_takes_precedence_over_the_best_format(models: Any, tmp_path: Path) -> None:
    out = new_config(SHAPES[1], models, tmp_path, "--data.sources.0.format", "text")
    assert load_config(out).data.sources[0].format == "text"
    assert load_config(out).train.epochs == 1  # as for all plain texts


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--data.sources.0.format", "alpacka"], "data.sources.0.format"),
        (["--data.sources.0.formt", "alpaca"], "did you mean data.sources.0.format?"),
        (["--train.packs_per_step", "3", "--nproc", "2"], "train.packs_per_step: 3"),
        (["--data.sources.0.columns", "{query: question}"], "data.sources.0.columns"),
    ],
)
def test_wrong_override_prints_one_line(
    arguments: list[str], error: str, models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = models("text"), PLAIN.write(tmp_path)
    capsys.readouterr()
    assert main(["new", str(folder), str(data), "--out", str(tmp_path / "a.yaml"), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert error in message
    assert not (tmp_path / "a.yaml").exists()


CHOICES = {
    "columns": (Shape("unknown names", lambda number: {"title": f"a {number}", "body": "b"}), "text"),
    "media_dir": (Shape("missing images", lambda number: {"image": f"{number}.jpg", "caption": "b"}), "qwen3_vl"),
}


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_shape_gives_a_config_with_one_line_to_choose(
    key: str, models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, model = CHOICES[key]
    out, data = tmp_path / "a.yaml", shape.write(tmp_path)
    assert main(["new", str(models(model)), str(data), "--out", str(out)]) == 0
    assert "CHOOSE" in capsys.readouterr().out
    lines = out.read_text().splitlines()
    (marked,) = [number for number, line in enumerate(lines) if "# CHOOSE" in line]
    assert f"{key}: " in lines[marked + 1]
    assert sum("CHOOSE_" in line for line in lines) == 1
    assert main(["data", "inspect", str(out)]) == 2
    assert f"data.sources.0.{key}" in capsys.readouterr().err


def test_few_bad_rows_are_skipped_with_a_marked_line(models: Any, tmp_path: Path) -> None:
    shape = Shape("one bad row", lambda number: {"query": "a", "response": "b" if number else 3})
    out = new_config(shape, models, tmp_path)
    assert load_config(out).data.on_bad_row == "skip"
    assert f"1 of {NUM_ROWS}" in out.read_text()


def test_packs_per_step_fits_as_many_ranks_as_cores(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    out = new_config(PLAIN, models, tmp_path)
    assert load_config(out).train.packs_per_step % 2 == 0
