"""Layout invariance: one process, FSDP 2 and HSDP 2x2 give the same run, with any accumulation and recomputation.

The ranks of each world size start once and do all its runs. The reference for gradients uses no OmniZoo code: a plain
transformers model, one sample per forward pass, and cross entropy of torch.
"""

import json
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import make_tokenizer
from processes import run_on_ranks, train_in_this_world
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, model_config, read_steps, write_config
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.models.build import build_model
from omnizoo.models.read_config import load_tokenizer
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training import loop
from omnizoo.training.objective import build_objective
from omnizoo.training.optimizers.build import build_optimizer
from omnizoo.training.step import train_step

FP64 = ["--train.precision", "fp64"]
HSDP = ["--parallel.dp_replicate", "2"]
REDUCE_EACH = ["--parallel.reduce_each_micro_batch", "true"]
DTYPE = {"fp32": torch.float32, "fp64": torch.float64}

# The runs of each world size, by name. A forward pass has 1 pack per rank, unless the name has another number.
STEPS, SAVED, FEW = 8, 4, 3
SAVING = ["--checkpoint.every", str(SAVED), "--checkpoint.keep", "9"]
SHORT = ["--train.steps", str(FEW)]
# Steps of 5 to 19 samples, whose number of packs is no multiple of the number of ranks.
SAMPLES = [
    *("--data.look_ahead", "null", "--train.samples_per_step", "19"),
    *("--train.batch_warmup", "{steps: 4, start: 0.25}", "--train.steps", "6"),
]
FOUR = {
    "hsdp": [*HSDP, *SAVING],
    "hsdp fp64": [*HSDP, *SAVING, *FP64],
    "hsdp, reduced each micro-batch": [*HSDP, *REDUCE_EACH, *SHORT],
    "hsdp, samples": [*HSDP, *SAMPLES],
}
TWO = {
    "fsdp": [],
    "fsdp fp64": FP64,
    "fsdp, 4 packs at once": ["--train.micro_batch", "4", *SHORT],
    "fsdp, reduced each micro-batch": [*REDUCE_EACH, *SHORT],
    "fsdp, weights kept after forward": ["--parallel.reshard_after_forward", "false", *SHORT],
    "fsdp, full recompute": ["--parallel.recompute", "full", *SHORT],
    "fsdp fp64, selective recompute": ["--parallel.recompute", "selective", *FP64, *SHORT],
}
ONE = {
    "one": [],
    "one fp64": FP64,
    "one, 8 packs at once": ["--train.micro_batch", "8", *SHORT],
    "one, samples": SAMPLES,
    "one, selective recompute": ["--parallel.recompute", "selective", *SHORT],
    "one fp64, full recompute": ["--parallel.recompute", "full", *FP64, *SHORT],
}
ALL = ONE | TWO | FOUR


def train(folder: Path, name: str, args: list[str]) -> None:
    """Train on the ranks that are running, and write the sample ids of each step to `samples.<rank>.json`."""
    samples: dict[int, list[str]] = {}
    original = loop.train_step

    def record_samples(objective: Any, optimizer: Any, data: Any, step: int, **options: Any) -> Any:
        samples[step] = [sample for batch in data.micro_batches for sample in batch.sample_ids]
        return original(objective, optimizer, data, step, **options)

    loop.train_step = record_samples
    try:
        assert train_in_this_world([folder / "tiny.yaml", "--log.dir", folder / name, *args]) == 0
    finally:
        loop.train_step = original
    (folder / name / f"samples.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(samples))


def resumed(folder: Path, name: str) -> list[str]:
    return ["--checkpoint.resume", str(folder / name / "checkpoints" / f"step_{SAVED:08d}")]


def first_gradients(process: Process, args: list[str], out: Path) -> None:
    """Run the first step with the public functions, and write full gradients, loss and sample ids to `out`."""
    config = load_config(args[0], [*args[1:], "--train.grad_clip", "0"])
    mesh = build_mesh(config, process)
    tokenizer = load_tokenizer(config.model)
    loader = build_loader(config, tokenizer, mesh.rank, mesh.layout.world)
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, mesh, config)
    optimizer = build_optimizer(model, config)
    model.train()
    objective = build_objective(model, mesh, config)
    data = next_step(loader, Balancer(model, mesh, config))
    result = train_step(objective, optimizer, data, 1)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    samples = mesh.gather([sample for batch in data.micro_batches for sample in batch.sample_ids])
    if mesh.is_first:
        save_file(gradients, out.with_suffix(".safetensors"))
        facts = {"loss": result.loss, "grad_norm": result.grad_norm, "samples": list(chain(*samples))}
        out.with_suffix(".json").write_text(json.dumps(facts))


def four_ranks(process: Process, folder: str, family_config: str) -> None:
    for name, args in FOUR.items():
        train(Path(folder), name, args)
    for precision in DTYPE:
        args = [family_config, *HSDP, "--train.precision", precision]
        first_gradients(process, args, Path(folder) / f"gradients hsdp {precision}")


def two_ranks(process: Process, folder: str, family_config: str) -> None:
    for name, args in TWO.items():
        train(Path(folder), name, args)
    train(Path(folder), "hsdp, then fsdp", resumed(Path(folder), "hsdp"))
    train(Path(folder), "hsdp fp64, then fsdp", [*resumed(Path(folder), "hsdp fp64"), *FP64])
    for precision in DTYPE:
        args = [family_config, "--train.precision", precision]
        first_gradients(process, args, Path(folder) / f"gradients fsdp {precision}")


def one_process(folder: Path) -> None:
    for name, args in ONE.items():
        train(folder, name, args)
    train(folder, "hsdp, then one", resumed(folder, "hsdp"))
    train(folder, "hsdp fp64, then one", [*resumed(folder, "hsdp fp64"), *FP64])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all runs and the first gradients of sharded layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    # With a constant learning rate, a shorter run equals the first steps of a longer one.
    write_config(folder, train={"steps": STEPS, "schedule": "constant", "warmup_steps": 1})
    config = pretrained_config(folder / "published", "qwen3")
    for ranks, nproc in ((four_ranks, 4), (two_ranks, 2)):
        result = run_on_ranks(ranks, nproc, str(folder), str(config))
        assert result.code == 0, result.stdout + result.stderr
    one_process(folder)
    return folder


def pretrained_config(folder: Path, family: str) -> Path:
    """Write a transformers model with random weights, and return a config that trains it on text rows."""
    torch.manual_seed(1)
    fields = model_config(family)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    # Large weights, so that attention with its softcaps, windows and sinks affects the loss.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "model")
    make_tokenizer(folder / "model")
    return write_config(
        folder,
        model={"config": None, "path": str(folder / "model"), "tokenizer": None},
        data={"sources": [{"path": str(folder / "texts.jsonl")}], "pack_tokens": 64},
        train={"packs_per_step": 4},
    )


def plain_gradients(folder: Path, samples: list[str], precision: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the step, computed with transformers and torch only, one sample per forward pass."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPE[precision], **plain)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    ids = []
    for sample in samples:
        source, epoch, row, part = map(int, sample.split("/"))
        assert (source, epoch, part) == (0, 0, 0)
        ids.append(torch.tensor([*tokenizer(rows[row])["input_ids"], tokenizer.eos_token_id]))
    targets = sum(len(sample) - 1 for sample in ids)
    total = 0.0
    model.train()
    for sample in ids:
        with keep_precision(precision):  # models have norms and softmax in hard-coded float32
            logits = model(input_ids=sample[None]).logits[0, :-1]
            loss = F.cross_entropy(logits, sample[1:], reduction="sum") / targets
            loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_gradients_equal(out: Path, model_folder: Path, precision: str) -> None:
    facts = json.loads(out.with_suffix(".json").read_text())
    gradients = load_file(out.with_suffix(".safetensors"))
    loss, expected = plain_gradients(model_folder, facts["samples"], precision)
    tolerance = {"fp32": 1e-5, "fp64": 1e-9}[precision]
    assert facts["loss"] == pytest.approx(loss, rel=tolerance / 10)
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    assert facts["grad_norm"] == pytest.approx(float(norm), rel=tolerance / 10)
    assert gradients.keys() == expected.keys()
    errors = {name: float((gradients[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    print(f"largest gradient error of {out.name}: {max(errors.values()):.1e}")
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def assert_same(folder: Path, reference: str, names: list[str], first: float, every: float, start: int = 0) -> None:
    """Compare runs with a reference run, with tolerance `first` in the first step and `every` in the others."""
    for name in names:
        steps = read_steps(folder / name)
        last = FEW if SHORT[0] in ALL.get(name, []) else STEPS
        expected = read_steps(folder / reference)[start:last]
        assert [row["step"] for row in steps] == [row["step"] for row in expected] == list(range(start + 1, last + 1))
        assert [row["tokens"] for row in steps] == [row["tokens"] for row in expected]
        largest_error = 0.0
        for row, expected_row in zip(steps, expected, strict=True):
            tolerance = first if row["step"] == start + 1 else every
            for key in ("loss", "loss/texts", "loss/chats", "grad_norm"):
                largest_error = max(largest_error, abs(row[key] / expected_row[key] - 1))
                assert row[key] == pytest.approx(expected_row[key], rel=tolerance), (name, row["step"], key)
            assert row["lr"] == expected_row["lr"]
        print(f"{name} against {reference}: {largest_error:.1e}")


def samples_of(folder: Path, name: str) -> dict[int, list[str]]:
    """Return the sample ids of all ranks by step."""
    ranks = [json.loads(file.read_text()) for file in (folder / name).glob("samples.*.json")]
    return {int(step): sorted(chain(*(rank[step] for rank in ranks))) for step in ranks[0]}


@pytest.mark.slow
def test_every_layout_matches_one_process(folder: Path) -> None:
    names = [name for name in ALL if "fp64" not in name and "samples" not in name]
    assert_same(folder, "one", names, first=1e-6, every=1e-5)


@pytest.mark.slow
def test_every_layout_matches_one_process_in_float64(folder: Path) -> None:
    names = [name for name in ALL if "fp64" in name]
    assert_same(folder, "one fp64", names, first=1e-9, every=1e-9)


@pytest.mark.slow
def test_the_model_learns(folder: Path) -> None:
    losses = [row["loss"] for row in read_steps(folder / "one")]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
def test_steps_of_samples_with_batch_warmup_match_one_process(folder: Path) -> None:
    steps, expected = read_steps(folder / "hsdp, samples"), read_steps(folder / "one, samples")
    assert [row["samples"] for row in steps] == [5, 8, 12, 15, 19, 19]
    samples = samples_of(folder, "hsdp, samples")
    assert samples == samples_of(folder, "one, samples")
    assert [len(names) for names in samples.values()] == [row["samples"] for row in steps]
    for row, expected_row in zip(steps, expected, strict=True):
        keys = [key for key in expected_row if key.startswith("loss") or key == "grad_norm"]
        assert {"loss", "loss/texts"} <= set(keys)
        assert {key: row[key] for key in keys} == pytest.approx({key: expected_row[key] for key in keys}, rel=1e-5)
        assert all(row[key] == expected_row[key] for key in ("tokens", "packs", "lr"))


@pytest.mark.slow
def test_every_layout_trains_on_the_same_samples(folder: Path) -> None:
    expected = samples_of(folder, "one")
    assert sorted(expected) == list(range(1, STEPS + 1))
    sample_ids = [sample for step in expected.values() for sample in step]
    assert len(sample_ids) == len(set(sample_ids)) > STEPS * 8
    for name in ALL:
        if "samples" in name:
            continue
        samples = samples_of(folder, name)
        assert samples == {step: expected[step] for step in samples}


@pytest.mark.slow
@pytest.mark.parametrize("other", ["fsdp", "one"])
def test_hsdp_checkpoint_resumes_on_another_layout(folder: Path, other: str) -> None:
    assert_same(folder, "hsdp", [f"hsdp, then {other}"], first=1e-6, every=1e-5, start=SAVED)
    assert_same(folder, "hsdp fp64", [f"hsdp fp64, then {other}"], first=1e-9, every=1e-9, start=SAVED)
    uninterrupted = samples_of(folder, "hsdp")
    resumed_samples = samples_of(folder, f"hsdp, then {other}")
    assert resumed_samples == {step: samples for step, samples in uninterrupted.items() if step > SAVED}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_sharded_gradients_match_separate_samples(folder: Path, layout: str, precision: str) -> None:
    assert_gradients_equal(folder / f"gradients {layout} {precision}", folder / "published", precision)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_packs_match_separate_samples(family: str, precision: str, tmp_path: Path) -> None:
    config = pretrained_config(tmp_path, family)
    args = [str(config), "--train.precision", precision, "--train.micro_batch", "2"]
    with process_group() as process:
        first_gradients(process, args, tmp_path / "gradients")
    assert_gradients_equal(tmp_path / "gradients", tmp_path, precision)
