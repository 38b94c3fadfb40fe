"""Every option that saves time or memory: layouts agree with one process, and a resumed run is the one that went on."""

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
FEW = ("the leanest", "a budget")  # the others run in `make verify-all`
some = pytest.mark.parametrize(
    "option", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in OPTIONS]
)


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
def test_layouts_agree_with_one_process(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = [EXAMPLE, "--world", "4", "--layouts", "few", *OPTIONS[option]]
    result = run_omnizoo(["verify", *words], timeout=900)
    assert "3 of 3 layouts of 4 ranks agree with one process (fp32)" in result.stdout, result.stdout + result.stderr


def train(process: Process, folder: Path, options: list[str]) -> None:
    words = [EXAMPLE, "--parallel.ep", "2", "--train.steps", "6", "--train.packs_per_step", "4", "--data.pack_tokens"]
    words += ["160", "--evaluation.every", "0", "--checkpoint.every", "3", "--checkpoint.keep", "9", *options]
    assert train_in_this_world([*words, "--log.dir", folder / "whole"]) == 0
    resumed = ["--checkpoint.resume", folder / "whole/checkpoints/step_00000003"]
    assert train_in_this_world([*words, "--log.dir", folder / "again", *resumed]) == 0


@pytest.mark.slow
@some
def test_resumed_run_is_bit_identical(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run_on_ranks(train, 2, tmp_path, OPTIONS[option], timeout=600)
    assert result.code == 0, result.stdout + result.stderr
    whole, again = (
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_steps(tmp_path / name)]
        for name in ("whole", "again")
    )
    assert len(whole) == 6
    assert again == whole[3:]
    files = list((tmp_path / "whole/checkpoints/step_00000006/tensors").glob("*.safetensors"))
    assert files
    for file in files:
        saved, other = (load_file(Path(str(file).replace("/whole/", f"/{name}/"))) for name in ("whole", "again"))
        assert saved.keys() == other.keys()
        assert all(torch.equal(saved[name], other[name]) for name in saved)
