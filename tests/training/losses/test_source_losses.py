"""The training loss of each source: against a forward pass per sample, and against an evaluation of the same rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures import CHATML, make_tokenizer
from omni import SENSOR, write_omni_config
from preference_cases import pair_config, pair_rows
from tiny import read_steps, write_config
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.data.token_fields import IGNORE_INDEX
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import LossSums, build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import _means_by_source, train_step

SUPPORT = Path(__file__).parents[2] / "support"
CHUNKED = {"kind": "cross_entropy", "name": "chunked", "weight": 0.5, "options": {"chunked": True}}
# A plugin that returns `batch.sum(...)` is split by source; one that returns another tensor is not.
SPLIT = {"kind": "own_losses:Chunked", "name": "split", "weight": 0.0}
UNSPLIT = {"kind": "own_losses:Unsplit", "name": "unsplit", "weight": 1e-9}


@pytest.fixture(autouse=True)
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (SENSOR, SUPPORT):
        monkeypatch.syspath_prepend(str(folder))


def test_loss_of_each_source_matches_transformers_per_sample(tmp_path: Path) -> None:
    losses = [{"kind": "cross_entropy"}, CHUNKED, SPLIT, UNSPLIT]
    path = write_config(tmp_path, train={"packs_per_step": 4, "losses": losses})
    config = load_config(path, [])
    with process_group() as process:
        mesh = build_mesh(config, process)
        model = build_model(config.model, config.train.precision)
        parallelize_model(model, mesh, config)
        objective = build_objective(model, mesh, config)
        loader = build_loader(config, load_tokenizer(config.model), mesh.rank, mesh.layout.world)
        data = next_step(loader, Balancer(model, mesh, config))
        weights = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        result = train_step(objective, build_optimizer(model, config), data, 1)

    fields = dict(config.model.config)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    plain.load_state_dict(weights, strict=False)
    sums = {0: 0.0, 1: 0.0}
    counts = {0: 0, 1: 0}
    for batch in data.micro_batches:
        boundaries = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        for name, (first, last) in zip(batch.sample_ids, boundaries, strict=True):
            source = int(name.partition("/")[0])
            labels = batch.columns["labels"][0, first:last].long()
            with torch.no_grad():
                logits = plain(batch.columns["input_ids"][:, first:last], use_cache=False).logits[0]
            sums[source] += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            counts[source] += int((labels != IGNORE_INDEX).sum())

    for number, source in enumerate(("texts", "chats")):
        expected = sums[number] / counts[number]
        for term in ("text", "chunked", "split"):
            assert result.by_source[f"{source}/{term}"] == pytest.approx(expected, rel=1e-6)
        assert result.by_source[source] == pytest.approx(1.5 * expected, rel=1e-6)
    assert len(result.by_source) == 8
    assert result.metrics()["loss/chats"] == result.by_source["chats"]


def two_sources(folder: Path, rows: list[str]) -> list[str]:
    """Write rows to two files, and return arguments that train on both files and evaluate the same rows."""
    parts = {"text": rows[: len(rows) // 3], "other": rows[len(rows) // 3 :]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    sources = json.dumps([{"path": str(folder / f"{name}.jsonl")} for name in parts])
    return ["--data.sources", sources, "--data.eval_sources", sources]


def only_step(path: Path, *args: str) -> dict[str, Any]:
    """Train one step on all rows with a learning rate of nearly 0, evaluate them, and return the metrics."""
    config = yaml.safe_load(path.read_text())
    config["train"] = config["train"] | {"epochs": 1, "lr": 1e-12, "packs_per_step": 32}
    del config["train"]["steps"]
    path.write_text(yaml.safe_dump(config))
    assert main(["train", str(path), *args, "--evaluation.every", "1", "--evaluation.packs", "64"]) == 0
    (row,) = read_steps(path.parent / "run")
    return row


def assert_equal_to_evaluation(row: dict[str, Any], terms: tuple[str, ...]) -> None:
    for source, evaluated in (("text_2", "text"), ("other", "other")):  # a loss term has the name `text`
        assert row[f"loss/{source}"] == pytest.approx(row[f"eval/{evaluated}/loss"], rel=1e-5)
        for term in terms:
            assert row[f"loss/{source}/{term}"] == pytest.approx(row[f"eval/{evaluated}/loss/{term}"], rel=1e-5)


def test_media_loss_of_each_source_equals_its_evaluation(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer", CHATML)
    path = write_omni_config(tmp_path, "llama", ("audio", "series"))
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()[:48]
    row = only_step(path, *two_sources(tmp_path, rows))
    assert_equal_to_evaluation(row, ("text", "audio", "series"))
    assert row["loss/text_2/audio"] != pytest.approx(row["loss/other/audio"], rel=1e-2)


def test_preference_loss_of_each_source_equals_its_evaluation(tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in pair_rows(24)]
    path = pair_config(tmp_path, [{"kind": "simpo", "name": "other"}])
    row = only_step(path, *two_sources(tmp_path, rows))
    assert row["loss/text"] == pytest.approx(row["eval/text/loss"], rel=1e-5)
    assert row["loss/other_2"] == pytest.approx(row["eval/other/loss"], rel=1e-5)  # the loss has the name `other`
    assert row["loss/text"] != pytest.approx(row["loss/other_2"], rel=1e-3)


def test_source_that_has_no_targets_in_a_term_has_no_such_loss() -> None:
    losses = LossSums(
        by_source={"text": torch.zeros(3), "image": torch.zeros(3)},
        weights={"text": 1.0, "image": 0.5},
        counts_by_source={"a": {"text": 4.0, "image": 0.0}, "b": {"text": 2.0, "image": 8.0}},
    )
    means = _means_by_source(losses, ["a", "b"], [2.0, 3.0, 0.0, 0.0, 4.0, 0.0])
    assert means == {"a": 0.5, "a/text": 0.5, "b": 1.75, "b/text": 1.5, "b/image": 0.5}
    # The last value of a term counts the sums that were not split.
    means = _means_by_source(losses, ["a", "b"], [2.0, 3.0, 0.0, 0.0, 4.0, 1.0])
    assert means == {"a": 0.5, "a/text": 0.5, "b": 1.5, "b/text": 1.5}
