"""Log-probabilities of the reference from disk: the same run without the reference, on any layout; what was changed is
computed again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from preference_cases import pair_config, pair_rows, single_rows
from processes import train_on_ranks
from tiny import read_steps, write_rows

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.training.losses.reference_cache import SCHEMA, ReferenceCache, read_file
from omnizoo.training.losses.reference_model import Reference, ScoringModel

STEPS = ["--train.steps", "6", "--train.lr", "3e-3", "--evaluation.every", "3"]


@pytest.fixture(params=["dpo", "kto", "dpo of an adapter"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    adapter = {"rank": 4, "targets": ["all-linear"]} if "adapter" in request.param else None
    return make_config(tmp_path, request.param[:3], adapter)


def make_config(folder: Path, kind: str, adapter: dict[str, Any] | None = None) -> Path:
    rows = pair_rows(30) + (single_rows(30) if kind == "kto" else [])
    loss = {"kind": kind, "options": {"reference_cache": str(folder / "cache")}}
    path = pair_config(folder, [loss], rows, checkpoint={"every": 3}, model={"adapter": adapter})
    held_out = write_rows(folder / "held_out.jsonl", pair_rows(12))
    path.write_text(path.read_text().replace("  lanes: 4\n", f"  lanes: 4\n  eval_sources: [{{path: {held_out}}}]\n"))
    return path


def train(config: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """The figures of each step. A loss has its terms; times and rates are left out."""
    assert main(["train", str(config), "--log.dir", str(config.parent / name), *STEPS, *more]) == 0
    return figures(config.parent / name)


def figures(run: Path) -> list[dict[str, Any]]:
    names = ("loss", "grad_norm", "tokens", "eval/")
    return [{k: v for k, v in step.items() if k.startswith(names) and "per" not in k} for step in read_steps(run)]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for step, other in zip(found, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-5, abs=1e-6)


def without_cache(config: Path) -> list[str]:
    return ["--train.losses", json.dumps([{"kind": "kto" if "kind: kto" in config.read_text() else "dpo"}])]


def test_run_with_full_cache_matches_and_builds_no_reference(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(config, "plain", *without_cache(config))
    first = train(config, "first")
    assert first == plain
    assert "eval/loss" in plain[-1]
    folder = config.parent / "cache"
    files = {file: file.read_bytes() for file in folder.rglob("*.arrows")}
    assert len(files) == 1

    def refuse(*_: Any) -> None:
        raise AssertionError("the reference was built")

    monkeypatch.setattr(Reference, "scorer", property(refuse))
    assert train(config, "second") == plain
    shutil.rmtree(config.parent / "second" / "checkpoints" / "step_00000006")
    assert train(config, "second") == plain  # from step 3 on
    assert {file: file.read_bytes() for file in folder.rglob("*.arrows")} == files


def test_changed_responses_are_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = make_config(tmp_path, "dpo"), []
    compute = ScoringModel.sums

    def count(self: ScoringModel, batch: Any) -> Any:
        asked.append(batch)
        return compute(self, batch)

    monkeypatch.setattr(ScoringModel, "sums", count)
    train(config, "first")
    assert len(asked) > 0
    rows = pair_rows(30)
    rows[4]["chosen"] += " so"
    write_rows(tmp_path / "pairs.jsonl", rows)
    asked.clear()
    changed = train(config, "second")
    batches = len(asked)
    assert batches > 0
    assert changed == train(config, "plain", *without_cache(config))
    asked.clear()
    assert train(config, "third") == changed
    assert not asked
    assert len(list((tmp_path / "cache").iterdir())) == 1  # one reference
    train(config, "fourth", "--train.seed", "7")  # which draws other weights
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.slow
def test_cache_of_one_layout_is_read_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, "kto")
    plain = train(config, "plain", *without_cache(config))
    result = train_on_ranks([config, "--log.dir", tmp_path / "two", "--parallel.ulysses", 2, *STEPS], 2)
    assert result.code == 0, result.stderr
    assert_close(figures(tmp_path / "two"), plain)
    monkeypatch.setattr(Reference, "scorer", None)
    assert_close(train(config, "one"), plain)
    # Another value of each shows who reads it.
    (file,) = (tmp_path / "cache").rglob("*.arrows")
    values = {key: value + len(key.strip("0123")) / 8 for key, value in read_file(file).items()}
    with file.open("wb") as stream, pa.ipc.new_stream(stream, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([list(values), list(values.values())], schema=SCHEMA))
    moved = train(config, "moved")
    assert abs(moved[0]["loss"] - plain[0]["loss"]) > 1e-3
    result = train_on_ranks([config, "--log.dir", tmp_path / "apart", *STEPS], 2)
    assert result.code == 0, result.stderr
    assert_close(figures(tmp_path / "apart"), moved)


def test_truncated_cache_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    cache = ReferenceCache(str(tmp_path), "model", True, "key")
    for number in range(3):
        cache.add([f"a{number}", f"b{number}"], [number + 0.25, float("nan")])
    assert cache.values == {"": 0.0, "a0": 0.25, "a1": 1.25, "a2": 2.25}  # a value that is not finite is not kept
    (file,) = (tmp_path / "model").iterdir()
    whole = file.read_bytes()
    seen = set()
    for length in range(0, len(whole) + 1, 8):
        file.write_bytes(whole[:length])
        found = read_file(file)
        assert found == {f"a{number}": number + 0.25 for number in range(len(found))}
        seen.add(len(found))
    assert seen == {0, 1, 2, 3}
    assert ReferenceCache(str(tmp_path), "model", False, "key").values == cache.values
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^key: .*file: .*Not a directory"):
        ReferenceCache(str(tmp_path / "file"), "model", True, "key")
