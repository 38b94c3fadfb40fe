"""A model family with a user's recipe: samples during training, `omnizoo eval` and `omnizoo generate` with images."""

import json
import shutil
from pathlib import Path
from typing import Any

import own_recipe
import pytest
import yaml
from tiny import read_steps, write_rows

from omnizoo.cli.main import main

ROOT = Path(__file__).parents[3]
DATA = ROOT / "examples" / "published" / "data"


def ask(number: int, answer: str | None = "a red square.") -> dict[str, Any]:
    """Return a row that asks about an image."""
    parts = [{"type": "image", "image": f"image{number}.png"}, {"type": "text", "text": "What is there?"}]
    messages = [{"role": "user", "content": parts}]
    return {"messages": [*messages, {"role": "assistant", "content": answer}] if answer else messages}


def write_image_config(folder: Path, **sections: Any) -> Path:
    """Write a config that trains a family without a built-in recipe on images."""
    for file in DATA.glob("image*.png"):
        shutil.copy(file, folder)
    rows = write_rows(folder / "rows.jsonl", [ask(number) for number in range(8)])
    config: dict[str, Any] = {
        "model": {
            "config": own_recipe.MODEL,
            "tokenizer": str(DATA / "vision"),
            "recipe": "own_recipe:RECIPE",
            "modalities": {"image": {"encoder": {"options": {"edge": 32}}}},
        },
        "data": {"sources": [{"path": str(rows)}], "eval_sources": [{"path": str(rows)}], "pack_tokens": 192},
        "train": {"steps": 2, "packs_per_step": 1, "lr": 1e-3},
        "evaluation": {"every": 2, "samples": 2, "max_tokens": 3, "metrics": ["exact_match"]},
        "checkpoint": {"best": "eval/exact_match"},
        "log": {"dir": str(folder / "run"), "tensorboard": False},
    }
    for section, keys in sections.items():
        config[section] = config[section] | keys
    path = folder / "images.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_samples_and_generate_use_the_recipe_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    run = tmp_path / "run"
    assert main(["train", str(write_image_config(tmp_path))]) == 0, capsys.readouterr().err
    samples = read_lines(run / "samples.jsonl")
    assert [sorted(record.keys() & {"answer", "error"}) for record in samples] == [["answer"]] * 2
    assert read_steps(run)[-1]["eval/exact_match"] == 0.0
    assert (run / "checkpoints" / "best.json").is_file()
    shown = [record["question_items"] for record in samples]
    assert shown == [[{"modality": "image", "file": f"samples/questions/{number}/0.png"}] for number in range(2)]
    assert (run / shown[1][0]["file"]).read_bytes() == (DATA / "image1.png").read_bytes()
    assert f'src="./{shown[0][0]["file"]}"' in (run / "report.html").read_text()
    assert [record["metrics"] for record in samples] == [{"eval/exact_match": False}] * 2

    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    write_rows(tmp_path / "questions.jsonl", [ask(0), ask(1)])
    arguments = ["--messages", str(tmp_path / "questions.jsonl"), "--temperature", "0", "--max-tokens", "3"]
    arguments += ["--out", str(tmp_path / "out.jsonl")]
    expected = [record["answer"] for record in samples]
    allowed = {run: ["--allow-code", "own_recipe"], tmp_path / "exported": ["--recipe", "own_recipe:RECIPE"]}
    for place, flags in allowed.items():
        assert main(["generate", str(place), *arguments, *flags]) == 0, capsys.readouterr().err
        assert [record["answer"] for record in read_lines(tmp_path / "out.jsonl")] == expected

    capsys.readouterr()
    assert main(["generate", str(run), *arguments]) == 2  # a run folder may come from someone else
    assert "--allow-code own_recipe" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "exported"), *arguments]) == 2
    assert "--recipe" in capsys.readouterr().err


def test_failed_prompts_are_reported_once_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    held_out = write_rows(tmp_path / "held_out.jsonl", [ask(0), ask(8)])
    data = {"eval_sources": [{"path": str(held_out)}], "on_bad_row": "skip"}
    path = write_image_config(tmp_path, data=data, evaluation={"every": 1})
    image = (DATA / "image0.png").read_bytes()
    (tmp_path / "image8.png").write_bytes(image[: len(image) // 2])  # its header is intact, so its size is known
    assert main(["train", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("1 of 2 prompts have no response") == 1
    assert f"{held_out}:2" in out
    assert ["error" in record for record in read_lines(tmp_path / "run" / "samples.jsonl")] == [False, True] * 2
    assert main(["eval", str(path)]) == 0
    assert "1 of 2 prompts have no response" in capsys.readouterr().out
