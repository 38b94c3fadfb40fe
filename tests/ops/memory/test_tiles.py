"""Feed-forwards and experts in tiles of the sequence: the same numbers, and memory that does not grow with the pack."""

from pathlib import Path

import pytest
import torch
from tile_cases import LOSSES, MODELS, trial
from tiny import write_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.models.recipe import ModelFacts
from omnizoo.ops.memory.tiles import Tiles, is_row_wise
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.layout import Layout
from omnizoo.parallelize.tiles import compute_in_tiles, feed_forwards
from omnizoo.planning.memory_tracker import MemoryTracker
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import parse, prepare


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Mixing(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x.mean(1, keepdim=True))


class Shifting(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).roll(1, 1)


class Attending(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return self.down((x @ x.transpose(1, 2)).softmax(-1) @ x)


class Dropping(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiles")


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_tiled_losses_and_gradients_match_untiled(folder: Path, name: str, recompute: str) -> None:
    tiled, whole = trial(folder, name, tile_tokens=7, recompute=recompute)
    assert tiled.losses == pytest.approx(whole.losses, rel=1e-12)
    assert tiled.gradients.keys() == whole.gradients.keys()
    for key, gradient in whole.gradients.items():
        assert (tiled.gradients[key] - gradient).norm() <= 1e-9 * gradient.norm(), key


@pytest.mark.parametrize("layout", ["uly2.ep2", pytest.param("dp2.ep2", marks=pytest.mark.long)])
def test_expert_parallel_ranks_exchange_tile_by_tile(folder: Path, layout: str) -> None:
    path = write_config(
        folder,
        model={"config": MODELS["experts and a shared one"]},
        train={"losses": LOSSES},
        parallel={"tile_tokens": 7, "recompute": "full"},
    )
    prepare(load_config(path, []), 2, layout, "fp64", folder / layout)
    verdict = verdict_of(folder / layout, parse(layout, 2))
    assert verdict.passed, verdict


def peak(tokens: int, tile: int) -> int:
    """What forward and backward need beyond the rows in and out and their gradients."""
    module, rows = FeedForward(8, 64), torch.randn(tokens, 8, requires_grad=True)
    ledger = MemoryTracker(torch.device("cpu"), rounded=False)
    with ledger.watching():
        ledger.begin_step()
        tiles = Tiles(tile, Recomputation(), "fp32")
        tiles(module, module.forward, rows).backward(torch.ones(tokens, 8))
    return ledger.peak().bytes - 4 * rows.nbytes


def test_tiled_memory_does_not_grow_with_rows() -> None:
    assert peak(256, 32) == peak(1024, 32) < peak(256, 256) < peak(1024, 1024)


def test_gradients_of_tiles_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    module = FeedForward(8, 16).bfloat16()
    rows, grad = torch.randn(2048, 8, dtype=torch.bfloat16), torch.ones(2048, 8, dtype=torch.bfloat16)
    module(rows).backward(grad)
    whole = [p.grad for p in module.parameters()]
    module.zero_grad()
    Tiles(8, Recomputation(), "bf16")(module, module.forward, rows).backward(grad)
    for one, p in zip(whole, module.parameters(), strict=True):
        assert (p.grad - one).norm() <= 2e-2 * one.norm()


@pytest.mark.parametrize("kind", [Mixing, Shifting, Attending, Dropping])
def test_modules_that_mix_rows_or_are_random_are_not_tiled(kind: type[FeedForward]) -> None:
    with torch.device("meta"):
        assert is_row_wise(FeedForward(8, 16), 8)
        assert not is_row_wise(kind(8, 16), 8)
        assert feed_forwards(nn.ModuleList([kind(8, 16)]), []) == []


@pytest.mark.parametrize(
    ("family", "expected"),
    [("gemma2", ["mlp"]), ("falcon", ["mlp"]), ("lfm2", ["feed_forward"]), ("bamba", ["feed_forward"])],
)
def test_feed_forward_layers_are_detected_by_behavior(family: str, expected: list[str]) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    block = model.get_submodule("transformer.h.0" if family == "falcon" else "model.layers.0")
    found = feed_forwards(block, [])
    assert [name for name, module in block.named_modules() if module in found] == expected


def test_tile_tokens_without_feed_forward_layers_raises() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mixing(8, 16)

    with torch.device("meta"):
        model = nn.ModuleList([Block()])
    facts = ModelFacts(blocks=("0",), experts=(), num_experts=0, heads=0, kv_heads=0)

    class Mesh:
        layout = Layout()

    with pytest.raises(UserError, match=r"^parallel\.tile_tokens: 4 .*ModuleList"):
        compute_in_tiles(model, facts, Mesh(), 4, "fp32", Recomputation())
