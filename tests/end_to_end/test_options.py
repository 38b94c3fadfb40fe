"""Options that save time or memory: layouts agree with one process, and a resumed run is bit-identical."""

from pathlib import Path

import pytest
import torch
from processes import run_omnizoo, run_on_ranks, train_in_this_world
from safetensors.torch import load_file
from tiny import read_steps

from omnizoo.parallel.process import Process

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/qwen3_moe_tiny.yaml"
OPTIONS = {
    "as it is": [],
    "full recompute": ["--parallel.recompute", "full"],
    "selective recompute": ["--parallel.recompute", "selective"],
    "a budget": ["--parallel.recompute", "{budget: 0.5}"],
    "weights kept after forward": ["--parallel.reshard_after_forward", "false"],
    "weights gathered again": ["--parallel.reshard_after_forward", "true"],
    "reduced each micro-batch": ["--parallel.reduce_each_micro_batch", "true"],
    "tiles": ["--parallel.tile_tokens", "64"],
    "activations on the host": ["--parallel.offload", "[activations]"],
    "optimizer on the host": ["--parallel.offload", "[optimizer]"],
    "weights on the host": ["--parallel.offload", "[parameters]"],
    "moments in bf16": ["--optimizer.moments", "bf16"],
    "adafactor": ["--optimizer.kind", "adafactor"],
    "compiled": ["--train.compile", "true"],
}
TOGETHER = ("full recompute", "weights gathered again", "tiles", "activations on the host", "moments in bf16")
OPTIONS["the leanest"] = [word for name in TOGETHER for word in OPTIONS[name]]
COVERING = ("the leanest", "a budget")  # the others run in `make verify-all`
each_option = pytest.mark.parametrize(
    "option", [name if name in COVERING else pytest.param(name, marks=pytest.mark.long) for name in OPTIONS]
)


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_layouts_agree_with_one_process(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [EXAMPLE, "--world", "4", "--layouts", "few", *OPTIONS[option]]
    result = run_omnizoo(["verify", *words], timeout=900)
    assert "3 of 3 layouts" in result.stdout, result.stdout + result.stderr


def train(process: Process, folder: Path, options: list[str]) -> None:
    words = [EXAMPLE, "--parallel.ep", "2", "--train.steps", "6", "--train.packs_per_step", "4", "--data.pack_tokens"]
    words += ["160", "--evaluation.every", "0", "--checkpoint.every", "3", "--checkpoint.keep", "9", *options]
    assert train_in_this_world([*words, "--log.dir", folder / "uninterrupted"]) == 0
    resume = ["--checkpoint.resume", folder / "uninterrupted/checkpoints/step_00000003"]
    assert train_in_this_world([*words, "--log.dir", folder / "resumed", *resume]) == 0


@pytest.mark.slow
@each_option
def test_resumed_run_is_bit_identical(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run_on_ranks(train, 2, tmp_path, OPTIONS[option], timeout=600)
    assert result.code == 0, result.stdout + result.stderr

    def values(run: str) -> list[tuple[float, ...]]:
        return [(row["step"], row["loss"], row["grad_norm"]) for row in read_steps(tmp_path / run)]

    assert len(values("uninterrupted")) == 6
    assert values("resumed") == values("uninterrupted")[3:]

    tensors = Path("checkpoints/step_00000006/tensors")
    files = list((tmp_path / "uninterrupted" / tensors).glob("*.safetensors"))
    assert files
    for file in files:
        expected = load_file(file)
        resumed = load_file(tmp_path / "resumed" / tensors / file.name)
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
