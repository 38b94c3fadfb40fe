"""`log.profile` changes no loss and leaves a trace, a summary and a table."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import run_on_ranks, train_in_this_world
from tiny import SHAPE, read_steps, write_config
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.ops.torch_private import named_range
from omnizoo.training.profiling.profiler import named_modules
from omnizoo.training.profiling.summary import LARGEST, MODULE, PHASE, PRINTED, STEP, Time, summarize

MOE = {"model_type": "qwen3_moe", **SHAPE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def train_watched_and_not(_, config: Path, folder: Path) -> None:
    for name, also in (
        ("alone", []),
        ("watched", ["--log.verbose", "true", "--log.profile", "2:3", "--log.profile_ranks", "all"]),
    ):
        assert train_in_this_world([config, "--log.dir", folder / name, *also]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps with experts, sequence parallelism and recomputation on two ranks, without and with a profile."""
    folder = tmp_path_factory.mktemp("profiled")
    config = write_config(
        folder,
        model={"config": MOE},
        train={"steps": 4, "packs_per_step": 2},
        parallel={"ulysses": 2, "ep": 2, "recompute": "selective"},
    )
    result = run_on_ranks(train_watched_and_not, 2, config, folder)
    assert result.code == 0, result.stderr
    return folder, result.stdout


def test_profiling_does_not_change_losses(trained):
    folder, _ = trained
    alone, watched = (read_steps(folder / name) for name in ("alone", "watched"))
    assert len(alone) == 4
    for key in ("loss", "grad_norm", "tokens"):
        assert [step[key] for step in alone] == [step[key] for step in watched]


def test_profiler_writes_traces_summary_and_table(trained):
    folder, printed = trained
    files = {file.name for file in (folder / "watched" / "profile").iterdir()}
    assert files == {"trace.rank0.json.gz", "trace.rank1.json.gz", "summary.json"}
    assert printed.count("start: ") == 1  # only the verbose run prints it
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("profile of steps 2 to 3"))
    table = lines[first + 1 : first + 2 + 3 * PRINTED]
    kinds = [line.split()[0] for line in table if line.startswith("  ")]
    assert {"phase", "module", "operator"} <= set(kinds)
    assert len(kinds) <= 1 + 3 * PRINTED


def test_summary_has_times_by_phase_module_and_operator(trained):
    folder, _ = trained
    summary = json.loads((folder / "watched" / "profile" / "summary.json").read_text())
    assert summary["steps"] == [2, 3]
    phases, modules, operators = (
        {time["name"]: time for time in summary[key]} for key in ("phases", "modules", "operators")
    )
    assert {"data", "forward", "backward", "optimizer", "record"} <= set(phases)
    assert phases["forward"]["host_seconds"] >= modules["(model)"]["host_seconds"] > 0
    assert 0.5 < sum(time["host_seconds"] for time in phases.values()) / summary["seconds"] <= 1
    assert modules["model.layers.*.self_attn"]["calls"] >= 2  # two layers
    assert all(0 < time["host_seconds"] <= summary["seconds"] for time in operators.values())
    assert len(operators) == LARGEST


def test_trace_has_ranges_of_steps_phases_and_modules(trained):
    folder, _ = trained
    for rank in (0, 1):
        with gzip.open(folder / "watched" / "profile" / f"trace.rank{rank}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {name for name in names if name.startswith(STEP)} == {f"{STEP}2", f"{STEP}3"}
        assert {PHASE + phase for phase in ("data", "forward", "backward", "optimizer")} <= names
        for layer in ("model.layers.0", "model.layers.1"):
            assert {f"{MODULE}{layer}.self_attn", f"{MODULE}{layer}.mlp.experts"} <= names


def test_report_contains_start_up_durations(trained):
    folder, _ = trained
    start = json.loads((folder / "alone" / "starts.jsonl").read_text())
    parts = ("imports", "config", "process group", "model", "data", "shard", "weights", "optimizer", "first step")
    assert set(parts) <= set(start["seconds"])
    assert "to the end of the first step" in (folder / "alone" / "report.html").read_text()


class TwoLayers(nn.Module):
    """The second layer is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 4), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)


def test_layer_times_are_summed_and_hooks_removed():
    model = TwoLayers()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, named_modules(model), named_range(f"{STEP}7"):
        model(torch.randn(5, 8)).square().sum().backward()
    summary = summarize(recorded.key_averages())
    calls = {time.name: time.calls for time in summary.modules}
    assert calls == {"(model)": 1, "layers.*": 3, "layers.*.*": 4}  # the second layer runs twice
    assert "aten::addmm" in {time.name for time in summary.operators}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_device_times_are_kernel_times():
    """Events as `key_averages` returns them on a device, where kernels are events of their own."""

    def event(key: str, device_type: DeviceType = DeviceType.CPU, host: float = 0.0, device: float = 0.0) -> object:
        times = {"cpu_time_total": host, "self_cpu_time_total": host}
        times |= {"device_time_total": device, "self_device_time_total": device}
        return SimpleNamespace(key=key, count=1, device_type=device_type, **times)

    summary = summarize(
        [
            event(f"{STEP}1", host=1e6, device=8e5),
            event(f"{PHASE}forward", host=2e5, device=8e5),
            event("aten::add", host=2e4, device=1e5),
            event("aten::mm", host=1e4, device=7e5),
            event("sm90_gemm", DeviceType.CUDA, device=7e5),
        ]
    )
    assert summary.phases == [Time("forward", calls=1, host_seconds=0.2, device_seconds=0.8)]
    assert [time.name for time in summary.operators] == ["aten::mm", "aten::add"]
    assert "80.0%" in list(summary.table(Path("trace")))[2]


@pytest.mark.parametrize("steps", ["10", "12:10", "0:3", "1:200", "first:last", "1:2:3", ":", "-1:2"])
def test_invalid_profile_range_raises(tmp_path, steps):
    config = write_config(tmp_path)
    with pytest.raises(UserError, match=r"log\.profile: .*`first:last`"):
        load_config(config, ["--log.profile", f"'{steps}'"])


def test_profile_range_beyond_last_step_raises(tmp_path):
    with pytest.raises(UserError, match=r"log\.profile: 30:31 .*train\.steps is 20"):
        load_config(write_config(tmp_path), ["--log.profile", "30:31"])
    assert list(load_config(tmp_path / "tiny.yaml", ["--log.profile", "10:12"]).log.profiled) == [10, 11, 12]
