"""Activations on the host: the same bits, back one block ahead, and refused where the host has no room."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_omnizoo
from test_tiles import MODELS, trial
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.ops import offload
from omnizoo.ops.offload import Offload

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.mark.parametrize("recompute", ["none", "full", pytest.param("selective", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_without_it_to_the_bit(folder: Path, name: str, recompute: str) -> None:
    moved, plain = trial(folder, name, offload=["activations"], recompute=recompute)
    assert moved.losses == plain.losses
    for key, gradient in plain.gradients.items():
        assert torch.equal(moved.gradients[key], gradient), key


class Watched(offload.Host):
    """Notes what goes and comes, in order."""

    def __init__(self, device: torch.device, said: list[str]) -> None:
        super().__init__(device)
        self.said, self.names = said, {}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = super().take(tensor)
        self.names[id(kept)] = len(self.names)
        self.said.append(f"take {self.names[id(kept)]}")
        return kept

    def give(self, kept: torch.Tensor) -> Any:
        self.said.append(f"give {self.names[id(kept)]}")
        return super().give(kept)


class Square(nn.Module):
    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.name, self.said = name, said

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight  # saves x, and the weight, which stays
        y.register_hook(lambda _: self.said.append(f"backward {self.name}"))
        return y * y  # saves y, twice


def test_each_tensor_goes_once_weights_stay_and_blocks_come_back_one_ahead() -> None:
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
        with moving.moving(block):
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


def test_what_the_host_has_no_room_for_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "available_memory", lambda: 500)
    moving = Offload(torch.device("cpu"), 4, 2)
    block = Square("a", [])
    refused = pytest.raises(UserError, match=r"parallel\.offload: activations of 4 blocks x 2 rank\(s\) take about")
    with refused, moving.moving(block):
        block(torch.randn(5, 4, requires_grad=True))


def test_a_plan_counts_what_is_on_the_host() -> None:
    config = str(ROOT / "examples/text_tiny.yaml")
    settings = ["--world", 1, "--json", "--train.global_batch", 1, "--parallel.precision", "fp32"]
    found = []
    for extra in ([], ["--parallel.offload", "[activations]"]):
        with chdir(ROOT):
            result = run_omnizoo(["plan", config, *settings, *extra])
        assert result.code == 0, result.stderr
        found.append(json.loads(result.stdout))
    assert found[0]["host_memory_gb"] == 0
    saved = found[0]["peak_memory_gb"] - found[1]["peak_memory_gb"]
    assert 0 < saved < found[1]["host_memory_gb"]
