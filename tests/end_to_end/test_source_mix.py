"""Shares of sources: by size without weights, and unchanged in runs that started with equal shares."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import read_steps, write_config

from omnizoo.cli.main import main


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("mix"),
        data={"workers": 0},
        train={"steps": 6, "packs_per_step": 4},
        checkpoint={"every": 3},
    )


def train(config: Path, run: Path, weights: tuple[float | None, ...], *args: str) -> int:
    names = ("texts.jsonl", "chats.jsonl")  # 1,500 and 500 rows
    sources = []
    for name, weight in zip(names, weights, strict=True):
        sources.append({"path": str(config.parent / name)} | ({"weight": weight} if weight else {}))
    return main(["train", str(config), "--log.dir", str(run), "--data.sources", json.dumps(sources), *args])


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in read_steps(run)]


def saved_loader(run: Path, step: int) -> dict[str, Any]:
    file = run / "checkpoints" / f"step_{step:08}" / "state.json"
    loader: dict[str, Any] = json.loads(file.read_text())["loader"]
    return loader


def rows_read(run: Path, step: int) -> list[int]:
    """Return the number of rows of each source that all lanes have read."""
    lanes = saved_loader(run, step)["lanes"].values()
    return [sum(lane["cursors"][source][0] for lane in lanes) for source in range(2)]


@pytest.mark.slow
def test_sources_without_weights_are_mixed_by_size(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(config, run, (None, None)) == 0
    table = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "share 75.0% (by size)" in table
    assert "share 25.0% (by size)" in table
    texts, chats = rows_read(run, 6)
    assert abs(texts - 3 * chats) <= 8  # each of 4 lanes is within two rows of the mix
    assert train(config, tmp_path / "weighted", (3.0, None), "--train.steps", "2") == 0
    assert "share 75.0% (weight 3)" in " ".join(capsys.readouterr().out.replace("│", "").split())
    assert losses(tmp_path / "weighted")[0] == losses(run)[0]  # a source without weight counts as 1

    resume = ["--checkpoint.resume", str(run / "checkpoints" / "step_00000003")]
    assert train(config, tmp_path / "resumed", (None, None), *resume) == 0
    assert losses(tmp_path / "resumed") == losses(run)[3:]
    capsys.readouterr()
    assert train(config, tmp_path / "changed", (3.0, 1.0), *resume) == 2
    assert "error: data.sources: a weight is set" in capsys.readouterr().err


@pytest.mark.slow
def test_run_with_equal_shares_keeps_them_on_resume(
    config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before shares followed sizes, sources without weights were stored, and mixed, with weights of 1."""
    old = tmp_path / "old"
    assert train(config, old, (1.0, 1.0)) == 0
    assert "data.mix" not in saved_loader(old, 3)["fingerprint"]
    assert [source["weight"] for source in saved_loader(old, 3)["fingerprint"]["sources"]] == [1.0, 1.0]

    resumed = tmp_path / "resumed"
    resume = ["--checkpoint.resume", str(old / "checkpoints" / "step_00000003")]
    assert train(config, resumed, (None, None), *resume) == 0
    assert losses(resumed) == losses(old)[3:]
    assert "keeps the equal shares" in caplog.text
    assert saved_loader(resumed, 6)["lanes"] == saved_loader(old, 6)["lanes"]
    assert "data.mix" not in saved_loader(resumed, 6)["fingerprint"]  # resumes with equal shares again
    assert rows_read(resumed, 6)[0] == pytest.approx(rows_read(resumed, 6)[1], abs=8)
