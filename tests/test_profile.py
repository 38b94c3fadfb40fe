"""`log.profile`: it only watches, counts every instant once, and knows whose time it is."""

import gzip
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks, train_in_this_world
from tiny import SHAPE, read_steps, write_config
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.ops.torch_private import named_range
from omnizoo.training.profile_page import write_page
from omnizoo.training.profile_summary import merged, summarise
from omnizoo.training.profile_trace import read_trace
from omnizoo.training.profiler import named_modules

MOE = {"model_type": "qwen3_moe", **SHAPE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def train_watched_and_not(_, config: Path, folder: Path) -> None:
    wait = dist.Work.wait
    for name, also in (("alone", []), ("watched", ["--log.profile", "2:3", "--log.profile_ranks", "all"])):
        assert train_in_this_world([config, "--log.dir", folder / name, *also]) == 0
    assert dist.Work.wait is wait


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps with experts, sequence parallelism and recomputation on two ranks, without and with a profile."""
    folder = tmp_path_factory.mktemp("profiled")
    config = write_config(
        folder,
        model={"config": MOE},
        train={"steps": 4, "global_batch": 2},
        parallel={"ulysses": 2, "ep": 2, "recompute": "selective"},
    )
    result = run_on_ranks(train_watched_and_not, 2, config, folder)
    assert result.code == 0, result.stderr
    return folder, result.stdout


def test_losses_are_bit_equal_with_a_profile(trained):
    folder, _ = trained
    alone, watched = (read_steps(folder / name) for name in ("alone", "watched"))
    assert len(alone) == 4
    for key in ("loss", "grad_norm", "tokens"):
        assert [step[key] for step in alone] == [step[key] for step in watched]


def test_a_profile_leaves_traces_a_page_a_summary_and_five_lines(trained):
    folder, said = trained
    files = {file.name for file in (folder / "watched" / "profile").iterdir()}
    assert files == {"trace.rank0.json.gz", "trace.rank1.json.gz", "profile.html", "summary.json"}
    lines = said.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("profile of steps 2 to 3"))
    assert [line.startswith("  ") for line in lines[first + 1 : first + 5]] == [True] * 4
    assert "start: " in said
    page = (folder / "watched" / "profile" / "profile.html").read_text()
    assert_closed(page)
    for words in ("exposed communication", "recompute", "self_attn", "experts", "Our own overhead", "slowest / mean"):
        assert words in page
    assert "<script" not in page
    assert "http" not in page.replace("chrome://", "")


def test_every_instant_of_a_step_is_of_one_kind_and_modules_have_theirs(trained):
    folder, _ = trained
    for rank in (0, 1):
        with gzip.open(folder / "watched" / "profile" / f"trace.rank{rank}.json.gz") as file:
            figures = read_trace(json.load(file))
        assert list(figures.steps) == [2, 3]
        assert sum(figures.kinds.values()) == pytest.approx(sum(figures.steps.values()), rel=1e-6)
        assert {"forward", "recompute", "backward", "communication", "optimizer", "data"} <= set(figures.kinds)
        for layer in ("model.layers.0", "model.layers.1"):
            attention, experts = figures.modules[f"{layer}.self_attn"], figures.modules[f"{layer}.mlp.experts"]
            for times in (attention, experts):  # all-to-alls of heads and of tokens, forward and backward
                assert {"forward", "backward", "communication"} <= set(times)
            assert "recompute" in figures.modules[f"{layer}.input_layernorm"]
        assert {"all-gather", "reduce-scatter", "all-to-all"} & {wait.what for wait in figures.waits}
    summary = json.loads((folder / "watched" / "profile" / "summary.json").read_text())
    assert summary["world"] == 2
    assert sum(kind["share"] for kind in summary["kinds"].values()) == pytest.approx(1)
    assert summary["cpu"]["process"] >= summary["cpu"]["main"] > 0
    assert summary["phases"]["backward"]["wall"] > 0


def test_the_report_tells_how_long_a_start_took(trained):
    folder, _ = trained
    start = json.loads((folder / "alone" / "starts.jsonl").read_text())
    parts = ("imports", "config", "process group", "model", "data", "shard", "weights", "optimizer", "first step")
    assert set(parts) <= set(start["seconds"])
    assert "to the end of the first step" in (folder / "alone" / "report.html").read_text()


class Twice(nn.Module):
    """Two layers of which the second is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=False)


def test_backward_and_recomputation_are_of_the_module_whose_forward_it_was(tmp_path):
    model = Twice()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, named_modules(model), named_range("omnizoo::step 7"):
        with named_range("omnizoo::forward"):
            loss = model(torch.randn(5, 8)).square().sum()
        with named_range("omnizoo::backward"):
            loss.backward()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    figures = read_trace(trace)
    assert set(figures.modules["first"]) == {"forward", "backward"}
    assert set(figures.modules["second.0"]) == {"forward", "recompute", "backward"}
    assert set(figures.modules["second.1"]) == {"forward", "recompute", "backward"}
    assert set(figures.modules["(loss)"]) == {"forward", "backward"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def event(name: str, start: float, end: float, tid: object = 1, cat: str = "cpu_op", **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def test_on_a_device_only_communication_that_nothing_hides_counts():
    trace = [
        event("omnizoo::step 1", 0, 1000),
        event("omnizoo::data", 0, 100),
        event("omnizoo::forward", 100, 300),
        event("omnizoo::module ", 100, 300),
        event("omnizoo::module layer", 110, 200),
        event("aten::mm", 120, 130, **{"External id": 1}),
        event("c10d::_allgather_base_", 140, 150, **{"External id": 2}),
        event("kernel", 200, 500, tid="stream 7", cat="kernel", **{"External id": 1}),
        event("ncclDevKernel_AllGather", 400, 700, tid="stream 9", cat="kernel", **{"External id": 2}),
    ]
    figures = read_trace({"traceEvents": trace})
    kinds = {kind: round(1e6 * seconds) for kind, seconds in figures.kinds.items()}
    assert kinds == {"data": 100, "idle": 400, "forward": 300, "communication": 200}
    assert figures.device
    assert {kind: round(1e6 * s) for kind, s in figures.modules["layer"].items()} == {
        "forward": 300,
        "communication": 200,
    }


def test_a_wait_is_for_the_collective_that_ended_with_it():
    ops = {"Input Dims": [[64], [32], []], "Input type": ["float", "float", ""]}
    trace = [
        event("omnizoo::step 1", 0, 10_000),
        event("omnizoo::forward", 0, 9_000),
        event("FSDP::all_gather (layers.0)", 0, 20),
        event("c10d::_allgather_base_", 5, 15, **ops),
        event("FSDP::all_gather (layers.1)", 30, 50),
        event("c10d::_allgather_base_", 35, 45, **(ops | {"Input Dims": [[640], [320], []]})),
        event("omnizoo::wait", 100, 2000),
        event("omnizoo::wait", 2100, 8000),
        event("gloo:all_gather", 20, 1999, tid=8, cat="user_annotation"),
        event("gloo:all_gather", 60, 7999, tid=9, cat="user_annotation"),
    ]
    waits = read_trace({"traceEvents": trace}).waits
    assert [(wait.what, wait.module, wait.bytes) for wait in waits] == [
        ("all-gather", "layers.1", 1280),
        ("all-gather", "layers.0", 128),
    ]


def test_layers_are_told_of_together_and_modules_include_what_is_inside():
    times = {
        "": {"forward": 1.0},
        "layers.0.mlp": {"forward": 2.0},
        "layers.1.mlp": {"backward": 3.0},
        "(loss)": {"forward": 4.0},
    }
    found = merged(times)
    assert list(found) == ["", "layers", "layers.*", "layers.*.mlp", "(loss)"]
    assert found[""]["total"] == 6.0
    assert found["layers.*"] == {"total forward": 2.0, "total backward": 3.0, "total": 5.0}
    assert found["layers.*.mlp"]["backward"] == 3.0


def test_names_of_modules_cannot_break_the_page(tmp_path):
    attack = "<script>alert('x')</script>"
    figures = {
        "kinds": {"forward": 1.0},
        "between": {},
        "modules": {attack: {"forward": 1.0}},
        "operators": {attack: [1, 1.0]},
    }
    wait = {"seconds": 1.0, "what": attack, "module": attack, "bytes": None, "step": 1, "during": attack}
    clocks = {"process": 1.0, "main": 1.0, "data": 0.0, "workers": 0.0}
    rank = figures | {"rank": 0, "steps": {1: 1.0}, "overhead": {attack: 1.0}, "waits": [wait], "device": False}
    summary = summarise([rank | {"phases": {}, "clocks": clocks}], attack)
    page = write_page(tmp_path / "profile.html", attack, summary).read_text()
    assert_closed(page)
    assert "<script" not in page


@pytest.mark.parametrize("steps", ["10", "12:10", "0:3", "1:200", "first:last", "1:2:3", ":", "-1:2"])
def test_steps_to_profile_are_first_and_last(tmp_path, steps):
    config = write_config(tmp_path)
    with pytest.raises(UserError, match=r"log\.profile.*expected `first:last`, such as 10:12"):
        load_config(config, ["--log.profile", f"'{steps}'"])


def test_steps_that_a_run_does_not_have_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"log\.profile is 30:31, but train\.steps is 20"):
        load_config(write_config(tmp_path), ["--log.profile", "30:31"])
    assert list(load_config(tmp_path / "tiny.yaml", ["--log.profile", "10:12"]).log.profiled) == [10, 11, 12]


def assert_closed(html: str) -> None:
    opened: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br"):
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Reader().feed(html)
    assert not opened
