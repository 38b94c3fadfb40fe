"""Runs any trainer unchanged, and measures it as every other.

    python probe.py TARGET.py args...        or: python probe.py -m package.module args...

Tokens are counted where the token embedding is looked up: all of them, and those that are not padding. A step ends when
an optimizer's `step` returns. CPU seconds are those of the process and of all that it has started. One JSON object a
step goes to `PROBE_OUT/rank<N>.jsonl`; `PROBE_VOCABULARY` and `PROBE_PAD` tell which embedding and which id is meant.
With `PROBE_MEMORY=1` the bytes of all live tensors are counted, too, which takes time; with `PROBE_PROFILE=1` the last
step says which operators took how much of it.
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

BEGAN = float(os.environ.get("PROBE_BEGAN", time.time()))
OUT = Path(os.environ["PROBE_OUT"]) / f"rank{os.environ.get('RANK', '0')}.jsonl"
VOCABULARY, PAD = int(os.environ["PROBE_VOCABULARY"]), int(os.environ["PROBE_PAD"])

PROFILED = 4  # which step


class Probe:
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
        if weight.shape[0] != VOCABULARY or not torch.is_grad_enabled() or ids.is_meta:
            return
        if self.first_forward is None:
            self.first_forward = time.time() - BEGAN
        local = ids.to_local() if hasattr(ids, "to_local") else ids
        self.tokens += int((local != PAD).sum())
        self.all_tokens += local.numel()
        self.lookups += 1

    def step(self, *_: Any) -> None:
        if self.lookups == self.lookups_at_last_step:  # another optimizer of the same step
            return
        self.lookups_at_last_step = self.lookups
        record = {
            "seconds": time.time() - BEGAN,
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
            each = {event.key: event.self_cpu_time_total / 1e6 for event in self.profile.key_averages()}
            record["operators"], record["profiled"] = each, time.time() - self.profiled_from
        self.file.write(json.dumps(record) + "\n")
        if self.profile is not None and self.steps == PROFILED - 1:
            self.profiled_from = time.time()
            self.profile.start()

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += used.user + used.system
        own = self.process.cpu_times()
        return total + own.children_user + own.children_system  # of those that have ended


def peak_rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def name_ops_of_torchvision() -> list[torch.library.Library]:
    """Its wheels are built for CUDA, and their library does not load beside a torch for CPUs; the Python part, which is
    all that resizes pictures here, wants these to exist."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return [library]


def install() -> Probe:
    probe, own = Probe(), functional.embedding

    def embedding(ids: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        probe.look_up(ids, weight)
        return own(ids, weight, *args, **kwargs)

    functional.embedding = embedding
    register_optimizer_step_post_hook(probe.step)
    return probe


def run() -> None:
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
    kept = name_ops_of_torchvision()
    probe = install()
    with probe.live or nullcontext():
        run()
