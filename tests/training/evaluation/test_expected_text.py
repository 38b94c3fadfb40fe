"""The expected response is what the chat template writes, and media are compared by content."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_styles import LAST_REASONS
from fixtures import CHATML, make_tokenizer
from omni import MODALITIES, SENSOR, write_omni_config
from tiny import read_steps, write_config, write_rows

from omnizoo.cli.main import main
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.generation.generate import GeneratedPiece


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_exact_match_counts_learned_answer_of_template_with_think_block(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "capital of France?"}, {"role": "assistant", "content": "Paris"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}] * 16)
    data = {"sources": [{"path": str(rows)}], "eval_sources": [{"path": str(rows)}]}
    evaluation = {"every": 60, "samples": 1, "max_tokens": 40, "metrics": ["exact_match"]}
    train = {"steps": 60, "packs_per_step": 2, "lr": 1e-2}
    path = write_config(tmp_path, data=data, train=train, evaluation=evaluation)
    make_tokenizer(tmp_path / "tokenizer", LAST_REASONS)  # <think> is no special token, as in Qwen3
    assert main(["train", str(path)]) == 0
    assert read_steps(tmp_path / "run")[-1]["eval/exact_match"] == 1.0


def write_series_config(folder: Path, steps: int) -> Path:
    """A composed model that answers with a series of numbers."""
    make_tokenizer(folder / "tokenizer", CHATML)
    item = {"type": "series", "series": [0.0, 0.5, 1.0, 0.5]}
    turns = [{"role": "user", "content": [item]}, {"role": "assistant", "content": [item]}]
    rows = write_rows(folder / "waves.jsonl", [{"messages": turns}] * 8)
    return write_omni_config(
        folder,
        "llama",
        model={"modalities": {"series": MODALITIES["series"]}},
        data={"sources": [{"path": str(rows)}], "eval_sources": [{"path": str(rows)}]},
        train={"steps": steps, "packs_per_step": 2, "lr": 1e-2, "warmup_steps": 0},
        evaluation={"every": steps, "samples": 1, "max_tokens": 4, "metrics": ["exact_match"]},
    )


def test_generated_media_with_other_content_is_no_exact_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    assert main(["train", str(write_series_config(tmp_path, steps=30))]) == 0
    (record,) = samples(tmp_path / "run")
    assert record["answer"].strip() == record["expected"].strip() == "[series]"
    assert read_steps(tmp_path / "run")[-1]["eval/exact_match"] == 0.0


def test_media_are_compared_by_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))
    assert main(["train", str(write_series_config(tmp_path, steps=1))]) == 0
    allowed = ["--allow-code", "sensor"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *allowed]) == 0
    model = load_chat_model(tmp_path / "out", allow_code=["sensor"])
    decoder = model.modalities["series"].decoder
    assert decoder is not None
    row = json.loads((tmp_path / "waves.jsonl").read_text().splitlines()[0])
    (expected,) = model.renderer.question(row).expected_items
    targets = decoder.targets([decoder.prepare(expected.media)])
    assert model.has_same_media([GeneratedPiece("series", [], targets)], [expected])
    assert not model.has_same_media([GeneratedPiece("series", [], targets + 1)], [expected])
    assert not model.has_same_media([GeneratedPiece("series", [], targets[:-1])], [expected])
    assert not model.has_same_media([], [expected])
    assert not model.has_same_media([GeneratedPiece("series", [], targets)], [])
