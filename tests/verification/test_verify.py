"""`omnizoo verify` finds faults, names where they arise, and passes where there is none."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from faults import FAULTS, try_with_fault

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import Layout, layouts_of
from omnizoo.parallel.process import Process
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import parse, prepare
from omnizoo.verification.rank_processes import RankError, run_in_processes

ROOT = Path(__file__).parents[2]
LAYOUT = "dp2.uly2.ep2"
MOE = str(ROOT / "examples/qwen3_moe_tiny.yaml")
BACKWARD = "forward agrees; the first difference in backward is the gradient of"
NAMED = {  # what the verdict must name
    "wrong_divide_factor_on_experts": f"{BACKWARD} model.layers.1.mlp.experts",
    "positions_not_sliced": "the first difference is the output of model.rotary_emb",
    "packed_samples_see_each_other": "the first difference is the output of model.layers.0.self_attn",
    "balance_loss_per_rank": f"{BACKWARD} model.layers.1.mlp.gate.weight",
    "key_value_heads_repeated_wrongly": "the first difference is the output of model.layers.0.self_attn",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    prepare(load_config(MOE, []), 4, LAYOUT, "fp32", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_detected_and_located(fault: str, prepared: Path) -> None:
    run_in_processes(4, try_with_fault, prepared, parse(LAYOUT, 4), fault)
    verdict = json.loads((prepared / "verdict.json").read_text())
    assert not verdict["passed"]
    assert NAMED[fault] in verdict["reason"]


@pytest.mark.slow
def test_layout_without_fault_passes(prepared: Path) -> None:
    assert verdict_of(prepared, parse(LAYOUT, 4)).passed


class Stuck(torch.nn.Module):
    def forward(self, rank: int) -> None:
        if rank == 1:
            threading.Event().wait()
        torch.distributed.barrier()


def wait_for_nobody(process: Process) -> None:
    Stuck()(process.rank)


@pytest.mark.slow
def test_deadlocked_ranks_report_their_stacks() -> None:
    for seconds in (3, 20, 120):  # a busy machine needs more to bring them to where they wait
        said = rf"ranks \[0, 1\] of 2 did not finish within {seconds} s"
        with pytest.raises(RankError, match=said) as caught:
            run_in_processes(2, wait_for_nobody, timeout=seconds)
        _, first, second = re.split(r"stack of rank \d:", str(caught.value))
        if "in forward" in first and "in forward" in second:
            break
    assert re.search(r"in barrier(.|\n)*in forward", first)
    assert re.search(r"in wait(.|\n)*in forward", second)


@pytest.mark.slow
def test_module_plugin_is_verified(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=":")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    arguments = [
        "--model.module",
        "own_module:TinyModel",
        "--model.config",
        "{vocab_size: 512, width: 32, heads: 4, layers: 2}",
    ]
    layouts = [
        "--world",
        "4",
        "--layouts",
        "rep2.dp2",
        "--precision",
        "fp64",
    ]  # another one: tests/end_to_end/test_plugins.py
    assert main(["verify", str(ROOT / "examples/text_tiny.yaml"), *layouts, *arguments]) == 0
    assert "1 of 1 layouts of 4 ranks agree with one process (fp64)" in capfd.readouterr().out


def test_layout_names_are_parsed_and_invalid_ones_raise() -> None:
    assert parse("dp2.uly2.ep4", 4) == Layout(dp_shard=2, ulysses=2, ep=4)
    assert parse("ring4", 8) == Layout(dp_shard=2, ring=4)
    for wrong in ("dp3", "uly2.ep3", "fsdp2", "dp"):
        with pytest.raises(UserError, match="--layouts"):
            parse(wrong, 4)


def test_layouts_of_a_world_are_distinct_and_use_all_ranks() -> None:
    layouts = list(layouts_of(8))
    assert len(set(layouts)) == len(layouts)
    assert all(layout.world == 8 and layout.fsdp % layout.ep == 0 for layout in layouts)
    assert {8, 4, 2, 1} == {layout.ep for layout in layouts} == {layout.ring for layout in layouts}
