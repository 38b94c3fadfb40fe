"""Run any trainer unchanged, and measure all trainers in the same way.

    python probe.py TARGET.py args...        or: python probe.py -m package.module args...

Tokens, with and without padding, are counted in the lookup of the token embedding. A step ends when `step` of an
optimizer returns. CPU seconds are those of the process and of all processes that it has started. One JSON object per
step is written to `PROBE_OUT/rank<N>.jsonl`. `PROBE_VOCABULARY` is the number of rows of the token embedding, and
`PROBE_PAD` the id of padding. With `PROBE_MEMORY=1` the bytes of all live tensors are counted as well, which takes
time. With `PROBE_PROFILE=1` the record of step 4 has the time of each operator.
"""

import importlib.util
import json
import os
import runpy
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from live import LiveTensors
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

START = float(os.environ.get("PROBE_BEGAN", time.time()))
OUT = Path(os.environ["PROBE_OUT"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
VOCABULARY, PAD = int(os.environ["PROBE_VOCABULARY"]), int(os.environ["PROBE_PAD"])

PROFILED = 4  # number of the profiled step


class Probe:
    """Counts tokens, and writes a record after each step."""

    def __init__(self) -> None:
        self.tokens = self.all_tokens = self.lookups = self.lookups_at_last_step = 0
        self.first_forward: float | None = None
        self.explain = int(os.environ.get("PROBE_EXPLAIN", "0"))
        self.live = LiveTensors(bool(self.explain)) if os.environ.get("PROBE_MEMORY") == "1" else None
        self.profile = (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            if os.environ.get("PROBE_PROFILE") == "1"
            else None
        )
        self.steps, self.profiled_from = 0, 0.0
        self.process = psutil.Process()
        self.file = OUT.open("a", buffering=1)

    def look_up(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        """Count the tokens of a lookup in the token embedding."""
        if weight.shape[0] != VOCABULARY or not torch.is_grad_enabled() or ids.is_meta:
            return
        if self.first_forward is None:
            self.first_forward = time.time() - START
        local = ids.to_local() if hasattr(ids, "to_local") else ids
        self.tokens += int((local != PAD).sum())
        self.all_tokens += local.numel()
        self.lookups += 1

    def step(self, *_: Any) -> None:
        """Write the record of a step."""
        if self.lookups == self.lookups_at_last_step:  # another optimizer of the same step
            return
        self.lookups_at_last_step = self.lookups
        record = {
            "seconds": time.time() - START,
            "cpu": self.cpu_seconds(),
            "tokens": self.tokens,
            "all_tokens": self.all_tokens,
            "peak_rss_mb": peak_rss_mb(),
            "first_forward": self.first_forward,
        }
        if self.live is not None:
            record["peak_tensors_mb"] = self.live.peak / 2**20
            record["largest"] = self.live.largest(self.explain)
            self.live.begin()
        self.steps += 1
        if self.profile is not None and self.steps == PROFILED:
            self.profile.stop()
            operators = {event.key: event.self_cpu_time_total / 1e6 for event in self.profile.key_averages()}
            record["operators"], record["profiled"] = operators, time.time() - self.profiled_from
        self.file.write(json.dumps(record) + "\n")
        if self.profile is not None and self.steps == PROFILED - 1:
            self.profiled_from = time.time()
            self.profile.start()

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and its children, also of those that have ended."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += used.user + used.system
        own = self.process.cpu_times()
        return total + own.children_user + own.children_system


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def define_torchvision_operators() -> list[torch.library.Library]:
    """Define operators that torchvision needs at import.

    Its wheels are built for CUDA, so their library does not load with a CPU build of torch. Resizing images needs the
    Python part only.
    """
    if importlib.util.find_spec("torchvision") is None:
        return []
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


def install() -> Probe:
    """Install the probe in torch's embedding and optimizers."""
    probe, original = Probe(), functional.embedding

    def embedding(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        probe.look_up(ids, weight)
        return original(ids, weight, *args, **kwargs)

    functional.embedding = embedding
    register_optimizer_step_post_hook(probe.step)
    return probe


def run() -> None:
    """Run the target as `__main__`."""
    target, *rest = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    if target == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *rest]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    OUT.parent.mkdir(parents=True, exist_ok=True)
    libraries = define_torchvision_operators()  # the operators exist as long as this reference
    probe = install()
    with probe.live or nullcontext():
        run()
