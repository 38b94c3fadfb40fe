"""What is on the host: the same bits, activations back one block ahead, and refused where the host has no room."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_omnizoo
from streams import StreamChecker
from tile_cases import MODELS, trial
from tiny import read_steps, write_config
from torch import nn

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.ops.memory import offload
from omnizoo.ops.memory.offload import Offload, OffloadedState
from omnizoo.parallelize import memory
from omnizoo.training.optimizers.build import check_optimizer

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.mark.parametrize("recompute", ["none", "full", pytest.param("selective", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_offloaded_activations_keep_losses_and_gradients_bitwise(folder: Path, name: str, recompute: str) -> None:
    moved, plain = trial(folder, name, offload=["activations"], recompute=recompute)
    assert moved.losses == plain.losses
    for key, gradient in plain.gradients.items():
        assert torch.equal(moved.gradients[key], gradient), key


class Watched(offload.HostBuffers):
    """Notes what goes and comes, in order."""

    def __init__(self, device: torch.device, said: list[str]) -> None:
        super().__init__(device)
        self.said, self.names = said, {}

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = super().copy_to_host(tensor)
        self.names[id(kept)] = len(self.names)
        self.said.append(f"take {self.names[id(kept)]}")
        return kept

    def copy_to_device(self, kept: torch.Tensor) -> Any:
        self.said.append(f"give {self.names[id(kept)]}")
        return super().copy_to_device(kept)


class Square(nn.Module):
    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.name, self.said = name, said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight  # saves x, and the weight, which stays
        y.register_hook(lambda _: self.said.append(f"backward {self.name}"))
        return y * y  # saves y, twice


def test_tensors_are_offloaded_once_and_prefetched_one_block_early() -> None:
    said: list[str] = []
    blocks = [Square(name, said) for name in "abc"]
    moving = Offload(torch.device("cpu"), 3, 1)
    moving.host = Watched(torch.device("cpu"), said)
    x = torch.randn(5, 4, requires_grad=True)
    plain = x
    for block in blocks:
        plain = block(plain)
    expected = torch.autograd.grad(plain.sum(), [x, *(block.weight for block in blocks)])
    said.clear()
    out = x
    for block in blocks:
        with moving.offload_saved(block):
            out = block(out)
    assert said == [f"take {i}" for i in range(6)]
    found = torch.autograd.grad(out.sum(), [x, *(block.weight for block in blocks)])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert said[6:] == [
        *("give 4", "give 5", "give 2", "give 3", "backward c"),
        *("give 0", "give 1", "backward b"),
        "backward a",
    ]


def test_activations_larger_than_host_memory_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "available_memory", lambda: 500)
    moving = Offload(torch.device("cpu"), 4, 2)
    block = Square("a", [])
    refused = pytest.raises(UserError, match=r"^parallel\.offload: .*activations of 4 blocks .*\(2\)")
    with refused, moving.offload_saved(block):
        block(torch.randn(5, 4, requires_grad=True))


def test_offloaded_state_is_freed_and_restored_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, small = torch.randn(4, 4), torch.randn(8).bfloat16(), torch.tensor(3.0)
    before = first.clone(), second.clone()
    away = OffloadedState(torch.device("cpu"), 1)
    for _ in range(2):
        away.offload([first, second, small, first[1:]])
        assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
        assert small == 3
        away.restore()
        assert torch.equal(first, before[0])
        assert torch.equal(second, before[1])
        first.add_(1)
        before[0].add_(1)
    monkeypatch.setattr(offload, "available_memory", lambda: 10)
    with pytest.raises(UserError, match=r"^parallel\.offload: the optimizer state .*\(1\)"):
        away.offload([torch.randn(9)])


class RacingHost(offload.HostBuffers):
    """The defects that the checker must find: copies that nothing waits for."""

    def put_back(self, kept: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(kept, non_blocking=True)

    def copy_to_device(self, kept: torch.Tensor) -> Any:
        copy = super().copy_to_device(kept)
        copy.event = None
        return copy


def on_streams(kind: type[offload.HostBuffers]) -> offload.HostBuffers:
    """A host of a CPU that is used like an accelerator."""
    host = kind(torch.device("cpu"))
    host._module = torch.cpu
    return host


def races_of_activations(kind: type[offload.HostBuffers], uses_all: bool) -> list[str]:
    checker = StreamChecker()
    with checker.watching():
        blocks = [Square(name, []) for name in "abc"]
        moving = Offload(torch.device("cpu"), 3, 1)
        moving.host = on_streams(kind)
        out = first = torch.randn(5, 4, requires_grad=True)
        for block in blocks:
            with moving.offload_saved(block):
                out = block(out)
        # The gradient of the last weight needs nothing of the block before, which is fetched all the same.
        wanted = [first, *(block.weight for block in blocks)] if uses_all else [blocks[-1].weight]
        torch.autograd.grad(out.sum(), wanted)
        del out, first
    return checker.races


@pytest.mark.parametrize("uses_all", [True, False])
def test_activations_are_restored_without_stream_race(uses_all: bool) -> None:
    assert races_of_activations(offload.HostBuffers, uses_all) == []
    assert races_of_activations(RacingHost, uses_all)


def races_of_state(kind: type[offload.HostBuffers]) -> list[str]:
    checker = StreamChecker()
    with checker.watching():
        away = OffloadedState(torch.device("cpu"), 1)
        away.host = on_streams(kind)
        state = torch.randn(4, 4)
        for _ in range(2):
            away.offload([state])
            away.restore()
            state.add_(1)
    return checker.races


def test_state_is_restored_without_stream_race() -> None:
    assert races_of_state(offload.HostBuffers) == []
    assert races_of_state(RacingHost)


def test_fully_offloaded_run_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    path = write_config(tmp_path, train={"packs_per_step": 2, "schedule": "constant"}, checkpoint={"every": 2})
    away = ["--parallel.offload", "[activations, optimizer, parameters]"]
    for name, ends, settings in (("plain", [4], []), ("away", [2, 4], away)):
        for end in ends:
            words = ["--log.dir", str(tmp_path / name), "--train.steps", str(end), *settings]
            assert main(["train", str(path), *words]) == 0
    plain, moved = ([(row["loss"], row["grad_norm"]) for row in read_steps(tmp_path / n)] for n in ("plain", "away"))
    assert len(plain) == 4
    assert plain == moved


def test_plan_counts_offloaded_bytes() -> None:
    config = str(ROOT / "examples/text_tiny.yaml")
    # Matrices that are large enough to be moved.
    settings = [
        "--model.config.intermediate_size",
        2048,
        "--world",
        1,
        "--json",
        "--train.packs_per_step",
        1,
        "--train.precision",
        "fp32",
    ]
    found = []
    for what in ("", "activations", "optimizer", "parameters"):
        extra = ["--parallel.offload", f"[{what}]"]
        with chdir(ROOT):
            result = run_omnizoo(["plan", config, *settings, *extra])
        assert result.code == 0, result.stderr
        found.append(json.loads(result.stdout))
    assert found[0]["host_memory_gb"] == 0
    saved = found[0]["peak_memory_gb"] - found[1]["peak_memory_gb"]
    assert 0 < saved < found[1]["host_memory_gb"]
    state = found[0]["memory"]["optimizer"]
    assert found[2]["host_memory_gb"] == pytest.approx(state, rel=0.1)  # but for what is small
    assert found[0]["peak_memory_gb"] - found[2]["peak_memory_gb"] > 0.5 * state
    weights = found[0]["memory"]["weights"]
    assert found[3]["memory"]["weights"] < 0.1 * weights  # buffers
    assert found[3]["memory"]["optimizer"] < 0.01 * state
    assert found[3]["host_memory_gb"] == pytest.approx(weights + weights + state, rel=0.1)  # and gradients


BESIDE = {
    "adapter": ("lora_tiny.yaml", []),
    "base in 4 bits": ("lora_tiny.yaml", ["--model.adapter.base", "nf4"]),
    "average": ("qwen3_moe_tiny.yaml", ["--optimizer.ema", "{decay: 0.9}"]),
    "moments in bf16": ("qwen3_moe_tiny.yaml", ["--optimizer.moments", "bf16"]),
    "frozen copy": (
        "qwen3_moe_tiny.yaml",
        ["--train.losses", "[{kind: dpo}]", "--data.sources", "[{path: examples/data/tiny/preferences.jsonl}]"],
    ),
    "media": ("published/qwen3_omni.yaml", []),
}


@pytest.mark.long
@pytest.mark.parametrize("beside", BESIDE)
def test_offloaded_weights_combine_with_other_options(beside: str) -> None:
    """On devices that are only planned, where a tensor on the wrong one is an error; and in numbers on four ranks."""
    example, settings = BESIDE[beside]
    words = [f"examples/{example}", *settings, "--parallel.offload", "[parameters]"]
    with chdir(ROOT):
        planned = run_omnizoo(["plan", *words, "--world", "4", "--json"])
        assert planned.code == 0, planned.stderr
        verified = run_omnizoo(["verify", *words, "--world", "4", "--layouts", "dp4,uly2.ring2"])
        assert verified.code == 0, verified.stdout + verified.stderr
    assert json.loads(planned.stdout)["host_memory_gb"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_weights_keep_losses_and_gradients_bitwise(folder: Path, name: str) -> None:
    moved, plain = trial(folder, name, offload=["parameters"], recompute="full")
    assert moved.losses == plain.losses
    for key, gradient in plain.gradients.items():
        assert torch.equal(moved.gradients[key], gradient), key


def test_weights_larger_than_host_memory_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"^parallel\.offload: weights, .*\(1\)"):
        trial(folder, "dense", offload=["parameters"])


def test_offloaded_weights_with_muon_raise(tmp_path: Path) -> None:
    path = write_config(tmp_path, parallel={"offload": ["parameters"]}, optimizer={"kind": "muon"})
    with pytest.raises(UserError, match=r"^parallel\.offload: .*muon"):
        check_optimizer(load_config(path, []))
