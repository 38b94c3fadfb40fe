"""Compiled blocks (`train.compile`): the numbers of blocks that are not, one set of graphs for each kind and for any
length, and a word where a block cannot be compiled.

Most of it is tried with graphs that torch has captured, differentiated and split as for its compiler, and then runs as
they are (`aot_eager`), which takes seconds; what the compiler makes of them is tried in `make verify-all`.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from processes import run_on_ranks, start_omnizoo, train_in_this_world
from tiny import model_config, read_steps, write_config

from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.ops.compiled_blocks import CompiledKind, Kinds, graph_break
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize import parallelize
from omnizoo.parallelize.compile import kinds_for
from omnizoo.verification.compare import TOLERANCE, Verdict, compare
from omnizoo.verification.prepare import load_trial, parse, plain, save_trial
from omnizoo.verification.trial import Trial, run_trial

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"config": model_config("qwen3")},
    "experts": {"config": model_config("qwen3") | {"model_type": "qwen3_moe"} | EXPERTS},
    "adapter": {
        "config": model_config("qwen3"),
        "adapter": {"kind": "lora", "rank": 4, "init": "random", "targets": ["q_proj", "up_proj"]},
    },
    "doubtful": {
        "module": "untraceable_block:DoubtfulModel",
        "config": {"vocab_size": 512, "width": 16, "heads": 2, "layers": 2},
    },
}
LOSSES = [{"kind": "cross_entropy"}, {"kind": "balance", "weight": 0.1}]


def config_of(
    folder: Path, model: str, layers: int = 2, steps: int = 2, precision: str = "fp32", **parallel: Any
) -> Config:
    spec = dict(MODELS[model])
    if "module" not in spec:
        spec["config"] = spec["config"] | {"num_hidden_layers": layers}
    train: dict[str, Any] = {"steps": steps, "packs_per_step": 2, "compile": True, "precision": precision}
    train |= {"losses": LOSSES} if model == "experts" else {}
    return load_config(write_config(folder, model=spec, train=train, parallel=parallel), [])


def compiled(
    config: Config, process: Process, layout: Layout, backend: str = "aot_eager"
) -> tuple[Trial, list[CompiledKind]]:
    kinds = Kinds(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize, "kinds_for", lambda device: kinds)
        return run_trial(config, layout, process), list(kinds)


def compared(config: Config, backend: str = "aot_eager") -> tuple[Verdict, Trial, list[CompiledKind]]:
    """One process with compiled blocks against one without."""
    with process_group((0, 1, 0)) as process:
        reference = run_trial(plain(config), Layout(), process)
        trial, kinds = compiled(config, process, Layout(), backend)
    return compare(trial, reference, "compiled", TOLERANCE[config.train.precision]), trial, kinds


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("dense", {"recompute": "full"}),
        ("experts", {"recompute": "selective", "tile_tokens": 7}),
        pytest.param("adapter", {}, marks=pytest.mark.long),
        pytest.param("experts", {"recompute": "full"}, marks=pytest.mark.long),
        pytest.param("dense", {"precision": "fp64"}, marks=pytest.mark.long),
        pytest.param("adapter", {"recompute": {"budget": 0.5}, "offload": ["activations"]}, marks=pytest.mark.long),
    ],
)
def test_compiled_losses_and_gradients_match_eager(tmp_path: Path, model: str, parallel: dict[str, Any]) -> None:
    verdict, _, kinds = compared(config_of(tmp_path, model, **parallel))
    assert verdict.passed, verdict.reason
    assert kinds
    assert all(kind.graphs for kind in kinds)
    assert not [kind.failure for kind in kinds if kind.failure]


@pytest.mark.long
@pytest.mark.parametrize(("model", "tile"), [("dense", None), ("experts", None), ("adapter", None), ("dense", 7)])
def test_layers_and_pack_lengths_share_graphs(tmp_path: Path, model: str, tile: int | None) -> None:
    fewest = 2 if model == "adapter" else 1  # what goes into its first layer has no gradient
    with process_group((0, 1, 0)) as process:
        _, once = compiled(config_of(tmp_path, model, fewest, 1, tile_tokens=tile), process, Layout())
        trial, often = compiled(config_of(tmp_path, model, fewest + 2, 5, tile_tokens=tile), process, Layout())
    assert len(set(trial.tokens)) > 1, "packs of different lengths"
    assert {kind.name: kind.graphs for kind in often} == {kind.name: kind.graphs for kind in once}


@pytest.mark.slow
@pytest.mark.long
def test_inductor_matches_eager(tmp_path: Path) -> None:
    verdict, _, kinds = compared(config_of(tmp_path, "dense"), "inductor")
    assert verdict.passed, verdict.reason
    assert [kind.failure for kind in kinds] == [None]


def try_layouts(process: Process, folder: Path, cases: list[tuple[str, str, str]]) -> None:
    for model, recompute, name in cases:
        config = load_config(folder / model / "tiny.yaml", ["--parallel.recompute", recompute])
        trial, kinds = compiled(config, process, parse(name, process.world_size))
        if process.rank == 0:
            verdict = compare(trial, load_trial(folder / model), name, TOLERANCE["fp32"])
            found = asdict(verdict) | {"failures": [kind.failure for kind in kinds if kind.failure]}
            (folder / f"{model}.{recompute}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [("experts", "selective", "uly2.ep2")]),
        pytest.param(4, [("experts", "selective", "uly2.dp2.ep4")], marks=pytest.mark.long),
        pytest.param(4, [("dense", "full", "rep2.ring2")], marks=pytest.mark.long),
    ],
)
def test_compiled_layouts_match_one_eager_process(
    tmp_path: Path, world: int, cases: list[tuple[str, str, str]]
) -> None:
    with process_group((0, 1, 0)) as process:
        for model, *_ in cases:
            save_trial(run_trial(plain(config_of(tmp_path / model, model)), Layout(), process), tmp_path / model)
    result = run_on_ranks(try_layouts, world, tmp_path, cases)
    assert result.code == 0, result.stdout + result.stderr
    for model, recompute, _ in cases:
        found = json.loads((tmp_path / f"{model}.{recompute}.json").read_text())
        assert found["passed"], found
        assert not found["failures"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_that_fail_to_compile_run_eagerly_and_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recompute: str
) -> None:
    with caplog.at_level(logging.WARNING):
        verdict, _, (kind,) = compared(config_of(tmp_path, "doubtful", recompute=recompute))
    assert verdict.passed, verdict.reason
    said = [record.getMessage() for record in caplog.records if "train.compile" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("train.compile: Doubtful runs without compilation: Data-dependent")
    assert kind.failure
    assert "\n" not in said[0]


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return around(x * 2) * 3


@graph_break
def around(x: torch.Tensor) -> torch.Tensor:
    return x.relu() if x.sum() > 0 else x


def test_failing_compiler_falls_back_to_eager(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Twice(), torch.randn(5, requires_grad=True)
    kind = Kinds("no such compiler").kind_of(module, Twice.forward)
    outs = [kind(module, x) for _ in range(2)]
    assert [out.tolist() for out in outs] == [Twice()(x).tolist()] * 2
    said = [record.getMessage() for record in caplog.records if "train.compile" in record.getMessage()]
    assert len(said) == 1
    assert "Twice runs without compilation" in said[0]


def test_graph_break_functions_run_eagerly() -> None:
    module = Twice()
    kind = Kinds("aot_eager").kind_of(module, Twice.forward)
    for length in (5, 9, 2):
        x = torch.randn(length)
        assert torch.equal(kind(module, x), Twice()(x))
    assert kind.failure is None
    assert kind.graphs == 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


def count_graphs(num_layers: int, lengths: tuple[int, ...]) -> int:
    """Return the number of graphs of equal layers, all of which run for each length."""
    kinds = Kinds("aot_eager")
    layers = [Layer() for _ in range(num_layers)]
    for length in lengths:
        for layer in layers:
            x = torch.randn(length, 4)
            torch.testing.assert_close(kinds.kind_of(layer, Layer.forward)(layer, x), layer(x))
    (kind,) = kinds
    assert kind.failure is None
    return kind.graphs


def test_equal_layers_and_lengths_share_graphs() -> None:
    assert 0 < count_graphs(3, (5, 9, 3, 8)) == count_graphs(1, (5,))


def test_missing_cpp_compiler_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert kinds_for(torch.device("cpu")) is None
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.records[0].getMessage()
    kinds = kinds_for(torch.device("cpu"))
    assert kinds is not None
    assert kinds.backend == "inductor"


STEPS, EVERY = 8, 3
VALUES = ("loss", "grad_norm", "tokens")


def train(process: Process, path: Path, run: Path) -> None:
    assert train_in_this_world([path, "--log.dir", run]) == 0


@pytest.mark.long
def test_killed_run_resumes_bitwise(tmp_path: Path) -> None:
    options = {"steps": STEPS, "packs_per_step": 2, "compile": True}
    path = write_config(tmp_path, train=options, checkpoint={"every": EVERY}, parallel={"recompute": "full"})
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    result = run_on_ranks(train, 2, path, undisturbed)
    assert result.code == 0, result.stdout + result.stderr
    running = start_omnizoo(["train", path, "--nproc", 2, "--log.dir", killed])
    assert running.wait_until(lambda: len(read_steps(killed)) > EVERY, 240)
    running.kill()
    result = run_on_ranks(train, 2, path, killed)
    assert result.code == 0, result.stdout + result.stderr
    curves = [[[row[key] for key in VALUES] for row in read_steps(run)] for run in (undisturbed, killed)]
    assert curves[0] == curves[1]
    assert len(curves[0]) == STEPS
