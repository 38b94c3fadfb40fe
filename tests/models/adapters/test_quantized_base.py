"""Quantized bases: published NF4 values, shards that are quantized like the full tensor, and the same gradients."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapter_cases import EXPERTS, MOE, ROOT, logits_of, publish
from processes import run_omnizoo, run_on_ranks
from safetensors.torch import load_file
from scipy.stats import norm
from tiny import read_steps, write_config
from torch import nn
from transformers import AutoModelForCausalLM

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import AdapterSettings, ModelSection
from omnizoo.models.adapters.quantized_base import quantize_base
from omnizoo.models.build import build_model
from omnizoo.models.flops import count_flops
from omnizoo.ops.experts import grouped_matmul
from omnizoo.ops.quantization import BLOCK, NF4, Nf4Table, Packed, Packing, count_weights, multiply
from omnizoo.parallel.fsdp.sharded_tensors import local_shard
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.parallelize.quantized_weights import quantized, quantized_weights
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import parse, prepare

KINDS = ("nf4", "int8")


def packing_of(weight: torch.Tensor, kind: str) -> Packing:
    return Packing(kind, weight.shape, weight.dtype, Nf4Table())


def test_nf4_values_are_quantiles_of_normal_distribution() -> None:
    """As in the paper, with zero in both halves; the outermost quantile is that of bitsandbytes."""
    outermost = 0.9677083
    above = norm.ppf(torch.linspace(outermost, 0.5, 9)[:-1].double())
    below = -norm.ppf(torch.linspace(outermost, 0.5, 8)[:-1].double())
    expected = torch.tensor(sorted([*above, 0.0, *below])) / max(above)
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), expected, rtol=0, atol=1e-6)


def test_nf4_matches_bitsandbytes_bitwise() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    packing = packing_of(weight, "nf4")
    assert torch.equal(packing.unpack(*packing.pack(weight)), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 128), (5, 70), (4, 48, 6), (3, 130, 4)])
def test_quantization_rounds_to_nearest_value_of_block(shape: tuple[int, ...], kind: str) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    packing = packing_of(weight, kind)
    codes, scales = packing.pack(weight)
    assert [list(codes.shape), list(scales.shape)] == list(packing.shapes)
    values = torch.tensor(NF4) if kind == "nf4" else torch.arange(-127, 128) / 127
    for block, found in zip(weight.split(BLOCK, 1), packing.unpack(codes, scales).split(BLOCK, 1), strict=True):
        possible = block.abs().amax(1, keepdim=True).unsqueeze(-1) * values
        nearest = (block.unsqueeze(-1) - possible).abs().amin(-1)
        torch.testing.assert_close((block - found).abs(), nearest, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_shard_matches_shard_of_quantized_tensor(kind: str) -> None:
    weight = torch.randn(8, 70, 6, generator=torch.Generator().manual_seed(2))
    whole = packing_of(weight, kind).pack(weight)
    for dim in (0, 2):  # the dims that layouts split
        for i, part in enumerate(weight.chunk(2, dim)):
            packed = packing_of(weight, kind).pack(part)
            assert all(torch.equal(a, b.chunk(2, dim)[i]) for a, b in zip(packed, whole, strict=True))


def test_quantized_matmul_matches_full_weight_without_storing_it() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 0, 4])
    for shape, by in (
        ((24, 96), torch.matmul),
        ((3, 24, 96), lambda rows, weight: grouped_matmul(rows, counts, weight)),
    ):
        weight = torch.randn(shape, generator=generator)
        packing = packing_of(weight, "nf4")
        codes, scales = packing.pack(weight)
        rows = torch.randn(7, 96, generator=generator, requires_grad=True)
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = multiply(rows, Packed(codes, scales, packing, is_transposed=True), by)
        assert {id(tensor) for tensor in saved} == {id(codes), id(scales)}
        grad = torch.randn(out.shape, generator=generator)
        (ours,) = torch.autograd.grad(out, rows, grad)
        expected = by(rows, packing.unpack(codes, scales).transpose(-1, -2))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, rows, grad)[0])


def build(base: str | None, fields: dict[str, Any] = MOE) -> nn.Module:
    adapter = AdapterSettings(rank=4, base=base, targets=["q_proj", *EXPERTS])
    return build_model(ModelSection(config=fields, adapter=adapter), "fp32")


def test_flops_and_sizes_ignore_quantization() -> None:
    plain, held = build(None), build("nf4")
    quantize_base(held, [f"model.layers.{i}.mlp.experts" for i in range(2)])
    names = set(quantized_weights(held))
    assert "model.layers.1.mlp.experts.down_proj" in names
    assert "model.layers.0.self_attn.k_proj.weight" in names
    assert not any("lm_head" in name or "embed" in name or ".gate." in name or "norm" in name for name in names)
    assert count_weights(held) == count_weights(plain) == sum(p.numel() for p in plain.parameters())
    assert count_flops(held) == count_flops(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "base", "precision"),
    [("rep2.dp2", "int8", "fp32"), ("uly2.ring2", "nf4", "fp32"), ("dp2.uly2.ep2", "nf4", "fp64")],
)
def test_layouts_agree_with_one_process(layout: str, base: str, precision: str, tmp_path: Path) -> None:
    config = load_config(ROOT / "examples/lora_tiny.yaml", ["--model.adapter.base", base])
    prepare(config, 4, layout, precision, tmp_path)
    verdict = verdict_of(tmp_path, parse(layout, 4))
    assert verdict.passed, verdict.reason


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of a run on a published model with a 4-bit base."""
    root = tmp_path_factory.mktemp("quantised")
    adapter = {"rank": 4, "alpha": 8.0, "base": "nf4", "targets": ["all-linear", *EXPERTS]}
    model = {"config": None, "tokenizer": None, "path": str(publish(root / "base")), "adapter": adapter}
    train = {"steps": 4, "packs_per_step": 2, "warmup_steps": 0, "lr": 1e-2}
    return write_config(root, model=model, train=train, checkpoint={"every": 2})


def check_shards(process: Process, config_file: Path) -> None:
    """Check that each rank has its shard of the quantized published weights."""
    config = load_config(config_file, ["--parallel.ulysses", "2", "--parallel.ep", "2", "--train.precision", "bf16"])
    model = build_model(config.model, "bf16")
    parallelize_model(model, build_mesh(config, process), config)
    base = AutoModelForCausalLM.from_pretrained(config.model.path).state_dict()
    weights = {name: base[name] for name in quantized_weights(model)}
    assert len(weights) == 2 * (4 + 2)  # two layers of four linear layers and two matrices of experts
    for name, expected in quantized(model, weights.items()):
        parameter = model.get_parameter(name)
        assert not parameter.requires_grad
        assert local_shard(parameter).numel() * 2 == expected.numel()
        assert torch.equal(parameter.full_tensor(), expected), name


@pytest.mark.slow
def test_published_base_is_quantized_on_load(published: Path) -> None:
    result = run_on_ranks(check_shards, 2, published)
    assert result.code == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_quantized_run_resumes_bitwise_and_merges_into_published_base(
    published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(published), "--log.dir", str(run)]) == 0
    shutil.copytree(run, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000004")
    assert main(["train", str(published), "--log.dir", str(tmp_path / "again")]) == 0
    config = yaml.safe_load(published.read_text())
    losses = [[row["loss"] for row in read_steps(folder)] for folder in (run, tmp_path / "again")]
    assert losses[0] == losses[1]
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge"]) == 0
    assert "a base model quantized to nf4" in caplog.text
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(Path(config["model"]["path"]) / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    change = merged["model.layers.0.self_attn.q_proj.weight"] - base["model.layers.0.self_attn.q_proj.weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 4  # without quantization error
    assert logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).isfinite().all()


@pytest.mark.long
def test_plan_reports_checkpoint_size_and_quantized_base_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    weights = {}
    short = ["--train.steps", "1", "--train.packs_per_step", "1", "--evaluation.every", "0", "--data.pack_tokens", "64"]
    quantised_base = ["--model.adapter.base", "nf4", "--model.adapter.rank", "16"]
    for name, args in {"adapter": quantised_base, "whole": ["--model.adapter", "null"]}.items():
        result = run_omnizoo(["plan", "examples/lora_tiny.yaml", "--world", "1", "--json", *args])
        assert result.code == 0, result.stderr
        found = json.loads(result.stdout)
        weights[name] = found["memory"]["weights"] * 2**30
        assert main(["train", "examples/lora_tiny.yaml", *short, *args, "--log.dir", str(tmp_path / name)]) == 0
        written = (tmp_path / name / "checkpoints" / "step_00000001").rglob("*")
        size = sum(file.stat().st_size for file in written if file.is_file())
        assert found["checkpoint"]["gb"] * 2**30 == pytest.approx(size, rel=0.05)
        assert found["checkpoint"]["seconds"] == pytest.approx(found["checkpoint"]["gb"] * 2**30 / 2e9)
    config = load_config("examples/lora_tiny.yaml", quantised_base)
    model = build_model(config.model, "fp32")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert (
        weights["adapter"] - trained < 0.35 * weights["whole"]
    )  # includes embedding and head, which are not quantized


def test_unsupported_quantization_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, train={"steps": 1, "packs_per_step": 1})
    for adapter, says in (
        (
            {"rank": 4, "base": "nf4", "kind": "dora"},
            "model.adapter.base: nf4 is not supported with model.adapter.kind: dora",
        ),
        ({"rank": 4, "base": "fp4"}, "model.adapter.base"),
    ):
        assert main(["train", str(config), "--model.adapter", json.dumps(adapter)]) == 2
        assert says in capsys.readouterr().err
