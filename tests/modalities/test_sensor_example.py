"""The example of docs/tutorials/new_modality.md: one short file adds a modality with encoder and decoder, and it
trains."""

from pathlib import Path

import pytest
from tiny import read_steps

from omnizoo.checkpoint.export import export
from omnizoo.config.load import load_config
from omnizoo.generation.chat_model import load_chat_model
from omnizoo.modalities.sampling import Sampling
from omnizoo.training.loop import train
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import prepare

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sensor"


@pytest.fixture(autouse=True)
def example_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE), prepend=":")


def test_example_is_under_80_lines_and_uses_public_api() -> None:
    source = (EXAMPLE / "sensor.py").read_text()
    assert len(source.splitlines()) < 80
    modules = {line.split()[1] for line in source.splitlines() if line.startswith("from omnizoo")}
    assert modules == {"omnizoo"}


def test_example_trains_and_generates_a_series(tmp_path: Path) -> None:
    # The initial loss of seed 0 is low, 0.73; that of other seeds is about 1.
    options = ["--train.steps=40", "--train.seed=1", f"--log.dir={tmp_path / 'run'}"]
    config = load_config(EXAMPLE / "sensor.yaml", options)
    assert train(config).exit_code == 0
    steps = read_steps(tmp_path / "run")
    assert steps[-1]["loss/series"] < 0.6 * steps[0]["loss/series"]
    assert steps[-1]["loss/text"] < 0.6 * steps[0]["loss/text"]
    export(tmp_path / "run", tmp_path / "model", allow_code=["sensor"])
    chat_model = load_chat_model(tmp_path / "model", allow_code=["sensor"])
    content = [{"type": "text", "text": "go on "}, {"type": "series", "series": [0.5] * 32}]
    pieces = chat_model.write([{"role": "user", "content": content}], Sampling(temperature=0), max_tokens=8)
    (series,) = [piece.item for piece in pieces if piece.modality == "series"]
    assert series.shape == (16,)


@pytest.mark.slow
def test_example_with_sequence_parallelism_matches_one_process(tmp_path: Path) -> None:
    layouts = prepare(load_config(EXAMPLE / "sensor.yaml", []), 2, "uly2", "fp64", tmp_path)
    verdicts = [verdict_of(tmp_path, layout) for layout in layouts]
    assert [verdict.reason for verdict in verdicts if verdict.reason] == []
