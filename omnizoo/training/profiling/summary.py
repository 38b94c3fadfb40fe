"""Summary of a profile: time per step by phase, module and operator, computed from `key_averages()` of torch."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType

STEP = "omnizoo::step "
PHASE = "omnizoo::phase "
MODULE = "omnizoo::module "
LARGEST = 20  # maximum number of entries of each kind in the summary
PRINTED = 8  # maximum number of entries of each kind in the printed table


@dataclass
class Time:
    """Number of calls and time of a phase, a module or an operator, per step."""

    name: str
    calls: float = 0.0
    host_seconds: float = 0.0
    device_seconds: float = 0.0  # time of the launched kernels; 0 without an accelerator


@dataclass(frozen=True)
class Summary:
    """Times per step. Times of phases and modules include nested calls; times of operators do not."""

    steps: list[int]
    seconds: float
    phases: list[Time]
    modules: list[Time]  # forward passes; numbered modules, such as layers, are summed under the name `*`
    operators: list[Time]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def table(self, trace_file: Path) -> Iterator[str]:
        """Yield the lines of the printed table."""
        steps = f"step {self.steps[0]}" if len(self.steps) == 1 else f"steps {self.steps[0]} to {self.steps[-1]}"
        yield f"profile of {steps}: {self.seconds:.3g} s per step; trace: {trace_file}"
        yield f"  {'':58}{'calls':>8}{'host s':>10}{'device s':>10}{'of step':>9}"
        for title, times in (("phase", self.phases), ("module", self.modules), ("operator", self.operators)):
            for time in times[:PRINTED]:
                share = max(time.host_seconds, time.device_seconds) / self.seconds
                name = f"{title} {time.name}"[:57]
                seconds = f"{time.host_seconds:>10.4f}{time.device_seconds:>10.4f}"
                yield f"  {name:58}{time.calls:>8.0f}{seconds}{share:>9.1%}"


def summarize(events: Iterable[Any]) -> Summary:
    """Summarize the events of `torch.profiler.profile.key_averages()`."""
    host_events = [event for event in events if event.device_type == DeviceType.CPU]
    step_events = [event for event in host_events if event.key.startswith(STEP)]
    count = len(step_events)

    phases: dict[str, Time] = {}
    modules: dict[str, Time] = {}
    operators: dict[str, Time] = {}
    for event in host_events:
        totals = (event.count, event.cpu_time_total, event.device_time_total)
        if event.key.startswith(PHASE):
            _add(phases, event.key.removeprefix(PHASE), count, *totals)
        elif event.key.startswith(MODULE):
            name = event.key.removeprefix(MODULE) or "(model)"
            _add(modules, re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), count, *totals)
        elif not event.key.startswith(STEP):
            _add(operators, event.key, count, event.count, event.self_cpu_time_total, event.self_device_time_total)

    return Summary(
        steps=sorted(int(event.key.removeprefix(STEP)) for event in step_events),
        seconds=sum(event.cpu_time_total for event in step_events) / 1e6 / count,
        phases=_largest(phases),
        modules=_largest(modules),
        operators=_largest(operators),
    )


def _add(times: dict[str, Time], name: str, steps: int, calls: int, host_us: float, device_us: float) -> None:
    time = times.setdefault(name, Time(name))
    time.calls += calls / steps
    time.host_seconds += host_us / 1e6 / steps
    time.device_seconds += device_us / 1e6 / steps


def _largest(times: dict[str, Time]) -> list[Time]:
    ordered = sorted(times.values(), key=lambda time: -max(time.host_seconds, time.device_seconds))
    return ordered[:LARGEST]
