"""A step with a non-finite loss or gradient changes nothing, and is counted and reported with its samples; too many of
them in a row end the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_tokenizer
from safetensors.torch import load_file
from tiny import model_config, read_steps, write_config, write_rows
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step

POISON = "\u2603"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model whose embedding of one rare token is NaN: a step is bad exactly if that token is in it."""
    tokenizer = make_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    fields = model_config("llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    rare = tokenizer(POISON)["input_ids"][0]
    with torch.no_grad():
        model.get_input_embeddings().weight[rare] = torch.nan
    model.save_pretrained(tmp_path / "model")
    path = write_config(
        tmp_path,
        model={"config": None, "path": str(tmp_path / "model"), "tokenizer": None},
        data={"sources": [{"path": str(tmp_path / "rows.jsonl")}], "shuffle": False, "pack_tokens": 16, "lanes": 1,
              "look_ahead": 1},
        train={"steps": 6, "packs_per_step": 2, "warmup_steps": 0, "max_bad_steps": 3},
        checkpoint={"every": 1, "keep": 20},
    )  # fmt: skip
    texts = json.loads("[" + ",".join((tmp_path / "texts.jsonl").read_text().splitlines()) + "]")
    assert not any(rare in tokenizer(row["text"])["input_ids"] for row in texts)
    return path


def rows(folder: Path, poisoned: set[int], count: int = 60) -> None:
    write_rows(folder / "rows.jsonl", [{"text": POISON if i in poisoned else f"row {i}"} for i in range(count)])


def weights_at(folder: Path, step: int) -> dict[str, Any]:
    (file,) = (folder / "run" / "checkpoints" / f"step_{step:08d}" / "tensors").glob("*.safetensors")
    return load_file(file)


def test_bad_steps_are_skipped_and_recorded_with_samples(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, {3, 6, 7})
    assert main(["train", str(config)]) == 0
    out = capsys.readouterr().out
    steps = read_steps(tmp_path / "run")
    bad = [row["step"] for row in steps if row["loss"] == "NaN"]
    assert len(steps) == 6
    assert 1 <= len(bad) <= 3
    reported = [json.loads(line) for line in (tmp_path / "run" / "bad_steps.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in reported] == bad
    assert {"0/0/3/0", "0/0/6/0", "0/0/7/0"} <= {sample for entry in reported for sample in entry["samples"]}
    assert all(set(entry["samples"]) & {"0/0/3/0", "0/0/6/0", "0/0/7/0"} for entry in reported)
    assert [row["bad_steps"] for row in steps] == [sum(b <= row["step"] for b in bad) for row in steps]
    for step in range(2, 7):
        if step in bad:
            assert f"step {step} skipped" in out
        before, after = weights_at(tmp_path, step - 1), weights_at(tmp_path, step)
        same = all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before)
        assert same == (step in bad)


def test_too_many_consecutive_bad_steps_end_the_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(tmp_path, set(range(4, 60)))
    assert main(["train", str(config)]) == 1
    err = capsys.readouterr().err
    assert "error: 3 steps in a row had a non-finite loss or gradient (train.max_bad_steps)" in err
    assert str(tmp_path / "run" / "bad_steps.jsonl") in err
    assert "Traceback" not in err
    losses = [row["loss"] for row in read_steps(tmp_path / "run")]
    assert losses[-3:] == ["NaN"] * 3
    assert "NaN" not in losses[:-3]
    assert (tmp_path / "run" / "report.html").is_file()


def test_count_of_consecutive_bad_steps_is_resumed(config: Path, tmp_path: Path) -> None:
    rows(tmp_path, set(range(60)))
    assert main(["train", str(config), "--train.steps", "2"]) == 0
    assert main(["train", str(config)]) == 1
    assert len(read_steps(tmp_path / "run")) == 3


def test_infinite_gradient_with_finite_loss_is_a_bad_step(config: Path, tmp_path: Path) -> None:
    rows(tmp_path, set())
    run = load_config(config, [])
    with process_group() as process:
        mesh = build_mesh(run, process)
        loader = build_loader(run, load_tokenizer(run.model), 0, 1)
        model = build_model(run.model, "fp32")
        parallelize_model(model, mesh, run)
        optimizer = build_optimizer(model, run)
        model.train()
        before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        handle = model.model.norm.register_full_backward_hook(lambda m, grads, _: (grads[0] * torch.inf,))
        objective, balancer = build_objective(model, mesh, run), Balancer(model, mesh, run)
        result = train_step(objective, optimizer, next_step(loader, balancer), 1)
        assert (result.finite, result.loss == result.loss) == (False, True)
        assert not any(value.any() for state in optimizer.state.values() for value in state.values())  # steps as well
        after = {name: p.full_tensor() for name, p in model.named_parameters()}
        assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before)
        handle.remove()
        assert train_step(objective, optimizer, next_step(loader, balancer), 2).finite
        known = [t.clone() for t in held_by(model, optimizer)]
        model.model.norm.register_full_backward_hook(lambda m, grads, _: (grads[0] * torch.inf,))
        assert not train_step(objective, optimizer, next_step(loader, balancer), 3).finite
        assert all(torch.equal(a, b) for a, b in zip(known, held_by(model, optimizer), strict=True))


def held_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights, and all that the optimizer keeps of them."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in (*model.parameters(), *kept)]
    return [value.nan_to_num() for value in whole]
