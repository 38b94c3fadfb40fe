"""`parallel.recompute: {budget: ...}`: the cheapest choice that fits, kept over a restart, and the same numbers."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import read_steps, write_config
from torch import nn

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.ops.device import total_memory
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallelize.recompute import MODES, measuring, recompute, set_modes, switches
from omnizoo.training.recompute_budget import Cost, choose, modes_in_order

VALUES = ("loss", "grad_norm", "lr", "tokens", "fill")


@st.composite
def kinds(draw: st.DrawFn) -> tuple[Cost, int]:
    full, more, most = (draw(st.integers(1, 30)) for _ in range(3))
    cheap, all_of_it = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kept = (full + more + most, full + more, full)
    return Cost(kept, (0.0, float(cheap), float(cheap + all_of_it))), draw(st.integers(1, 3))


def peak(costs: list[Cost], modes: list[list[int]]) -> int:
    """Backward, from the last block of a kind to its first; blocks of other kinds may all be still to come."""
    kept = [[cost.kept[mode] for mode in own] for cost, own in zip(costs, modes, strict=True)]
    most = total = sum(map(sum, kept))
    for cost, own in zip(costs, kept, strict=True):
        left = total
        for bytes_kept in own[::-1]:
            most = max(most, left - bytes_kept + cost.kept[0])
            left -= bytes_kept
    return most


def by_hand(costs: list[Cost], blocks: list[int], budget: int) -> float | None:
    """The least time of all assignments of modes to blocks, one by one."""
    fitting = []
    for each in product(*(product(range(3), repeat=count) for count in blocks)):
        modes = [sorted(own, reverse=True) for own in each]
        if peak(costs, modes) <= budget:
            fitting.append(sum(cost.seconds[m] for cost, own in zip(costs, modes, strict=True) for m in own))
    return min(fitting, default=None)


@settings(max_examples=60, deadline=None)
@given(st.lists(kinds(), min_size=1, max_size=2), st.integers(1, 400))
@example([(Cost((30, 26, 1), (0.0, 1.0, 8.0)), 3), (Cost((12, 9, 7), (0.0, 1.0, 2.0)), 3)], 107)
def test_choice_within_budget_is_the_fastest(found: list[tuple[Cost, int]], budget: int) -> None:
    costs, blocks = map(list, zip(*found, strict=True))
    expected = by_hand(costs, blocks, budget)
    if expected is None:
        with pytest.raises(UserError, match=r"^parallel\.recompute\.budget: "):
            choose(costs, blocks, budget)
    else:
        plan = choose(costs, blocks, budget)
        assert plan.seconds == expected
        assert plan.bytes <= budget
        assert [sum(counts) for counts in plan.counts] == blocks


def test_blocks_that_keep_most_memory_come_last() -> None:
    assert modes_in_order((1, 2, 1)) == ["full", "selective", "selective", "none"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def test_kept_bytes_match_a_manual_count() -> None:
    model = nn.ModuleList([Block(), Block()])
    for block in model:
        recompute(block, None, "fp32", Recomputation())
    assert len(switches(model)) == 2
    with measuring(model) as found, torch.no_grad():
        model[1](model[0](torch.randn(10, 8)))
    (meters,) = found.values()
    row, inner = 10 * 8 * 4, 10 * 32 * 4
    # What it gives; before and after the activation; for selective what the two matmuls gave.
    assert [meters[mode].kept for mode in MODES] == [row + 2 * inner, row + inner + row, row]
    assert 0 < meters["none"].cheap_seconds < meters["none"].seconds
    set_modes(model, {"0": "none", "1": "selective"})
    assert [switch.mode for switch in switches(model).values()] == ["none", "selective"]


def run(folder: Path, name: str, steps: int, *settings: object) -> int:
    words = ["--log.dir", folder / name, "--train.steps", steps, *settings]
    return main(["train", str(folder / "tiny.yaml"), *map(str, words)])


def test_resumed_run_keeps_its_choice_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_config(tmp_path, train={"packs_per_step": 1, "schedule": "constant"}, checkpoint={"every": 2})
    assert run(tmp_path, "refused", 4, "--parallel.recompute", "{budget: 1e-9}") != 0
    said = re.search(r"need at least ([\d.e-]+) GiB", capsys.readouterr().err)
    assert said is not None
    share = float(said[1]) * 1.1 * 2**30 / total_memory(torch.device("cpu"))
    assert run(tmp_path, "plain", 4) == 0
    assert run(tmp_path, "budget", 2, "--parallel.recompute", f"{{budget: {share}}}") == 0
    choice = re.search(r"recompute (blocks [\w ,]+): ", " ".join(capsys.readouterr().out.split()))
    assert choice is not None
    assert choice[1] != "blocks 2 none"
    assert run(tmp_path, "budget", 4, "--parallel.recompute", f"{{budget: {share}}}") == 0
    assert f"as in the checkpoint: {choice[1]}" in " ".join(capsys.readouterr().out.split())
    plain, kept = (
        [[row[key] for key in VALUES] for row in read_steps(tmp_path / name)] for name in ("plain", "budget")
    )
    assert plain == kept
