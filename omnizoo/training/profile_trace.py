"""Where the time of a step goes: reads a Chrome trace, as torch.profiler writes it, into plain figures.

Every instant of a step belongs to one kind. Without device kernels in the trace the timeline is that of the main
thread; with them it is that of the device, and what the device spends without a kernel is `idle` or the host's kind.
Names that begin with `omnizoo::` are ranges of training/profiler.py. docs/profiling.md defines the kinds.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

STEP, MODULE, WAIT, MARK = "omnizoo::step ", "omnizoo::module ", "omnizoo::wait", "omnizoo::"
PHASES = ("data", "forward", "backward", "optimizer")
APART = ("evaluation", "checkpoint")  # not of a step: all that is in them is theirs
OVERHEAD, COMMUNICATION, RECOMPUTE, IDLE = "overhead", "communication", "recompute", "idle"
KINDS = ("forward", RECOMPUTE, "backward", COMMUNICATION, "optimizer", "data", OVERHEAD, IDLE, *APART)
COMPUTE = ("forward", RECOMPUTE, "backward", COMMUNICATION)  # of which modules have a share
NODE = "autograd::engine::evaluate_function: "
SENDS = ("c10d::", "_c10d_functional::", "nccl:", "gloo:")
SYNCS = ("aten::item", "aten::_local_scalar_dense", "Synchronize")  # where the host waits for the device
LOSS, GRADIENTS, ELSEWHERE = "(loss)", "(gradients)", "(outside of modules)"
NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
}
ITEMSIZE = {"float": 4, "int": 4, "double": 8, "long": 8, "long int": 8, "c10::BFloat16": 2, "c10::Half": 2}
LONGEST = 10  # waits that are kept
ROUNDING = 0.01  # microseconds
LEAST_WAIT = 50.0  # microseconds; a shorter one is a call


@dataclass(slots=True, eq=False)
class Event:
    name: str
    start: float  # microseconds
    end: float
    thread: Any
    args: Mapping[str, Any]
    parent: "Event | None" = None
    inside: float = 0.0  # time of the events right below it
    step: int | None = None
    phase: str | None = None
    module: str | None = None
    sends: bool = False
    again: bool = False  # a module's forward pass, inside of backward
    of_step: bool = False

    @property
    def time(self) -> float:
        return self.end - self.start

    @property
    def own(self) -> float:
        return max(0.0, self.time - self.inside)

    @property
    def kind(self) -> str:
        if self.phase in APART:
            return str(self.phase)
        if self.sends:
            return COMMUNICATION
        if self.again and self.phase == "backward":
            return RECOMPUTE
        return self.phase if self.phase in PHASES else OVERHEAD

    @property
    def is_operator(self) -> bool:
        """Rather than a range around operators, whose own time is that of Python or of waiting."""
        return not self.name.startswith((MARK, "FSDP::", NODE, "Optimizer.", "torch::autograd"))


@dataclass
class Wait:
    seconds: float
    what: str
    module: str
    bytes: int | None
    step: int
    during: str  # phase


@dataclass
class Figures:
    """Of one rank, in seconds over all recorded steps."""

    steps: dict[int, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)
    between: dict[str, float] = field(default_factory=dict)  # of each kind: outside of operators, so in Python
    modules: dict[str, dict[str, float]] = field(default_factory=dict)  # by name, own time by kind
    operators: dict[str, list[float]] = field(default_factory=dict)  # by name: calls, seconds
    overhead: dict[str, float] = field(default_factory=dict)  # by what it was spent on
    waits: list[Wait] = field(default_factory=list)
    device: bool = False  # the timeline is that of a device


def read_trace(trace: Mapping[str, Any]) -> Figures:
    host, device = _events(trace["traceEvents"])
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    main = next((event.thread for event in host if event.name.startswith(STEP)), None)
    if main is None:
        return Figures()
    order = [main, *(thread for thread in threads if thread != main)]
    made_by: dict[int, str] = {}  # sequence number of a backward node: the module whose forward pass made it
    periods = [event for event in threads[main] if event.name.startswith(STEP)]
    for thread in order:
        _nest(threads[thread], made_by, periods)

    figures = Figures(device=bool(device))
    for period in periods:
        figures.steps[int(period.name.removeprefix(STEP))] = period.time / 1e6
    counted = [event for event in threads[main] if event.of_step]
    if device:
        _by_device(figures, device, host, periods, counted)
    else:
        for event in counted:
            _add(figures, event, event.own / 1e6)
    figures.waits = _waits(threads, main)
    return figures


def _events(raw: Iterable[Mapping[str, Any]]) -> tuple[list[Event], list[Event]]:
    """Of the host and of the device, in order of time, outer ones first."""
    host: list[Event] = []
    device: list[Event] = []
    for each in raw:
        category = each.get("cat", "")
        if each.get("ph") != "X" or category in ("Trace", "python_function") or category.startswith("gpu_user"):
            continue
        start = float(each["ts"])
        event = Event(each["name"], start, start + float(each.get("dur", 0)), each.get("tid"), each.get("args", {}))
        (device if category in ("kernel", "gpu_memcpy", "gpu_memset") else host).append(event)
    for events in (host, device):
        events.sort(key=lambda event: (event.start, -event.end))
    return host, device


def _nest(events: Sequence[Event], made_by: dict[int, str], periods: Sequence[Event]) -> None:
    """Give every event of one thread what it inherits from those around it."""
    stack: list[Event] = []
    for event in events:
        while stack and stack[-1].end <= event.start:
            stack.pop()
        while stack and event.end > stack[-1].end:
            if stack[-1].name.startswith(MARK) or event.end - stack[-1].end < ROUNDING:
                event.end = stack[-1].end
            else:
                _cut(stack.pop(), event.start)
        parent = stack[-1] if stack else None
        if parent is not None:
            event.parent = parent
            parent.inside += event.time
            event.step, event.phase, event.module = parent.step, parent.phase, parent.module
            event.sends, event.again, event.of_step = parent.sends, parent.again, parent.of_step
        stack.append(event)
        name = event.name
        if name.startswith(STEP):
            event.step, event.of_step = int(name.removeprefix(STEP)), True
        elif name.startswith(MODULE):
            event.again = event.again or event.phase == "backward"
            event.module = name.removeprefix(MODULE).strip()
        elif name == WAIT:
            event.sends = True
        elif name.startswith(MARK):
            event.phase = event.phase if event.phase in APART else name.removeprefix(MARK)
        elif name.startswith("FSDP::"):
            event.sends = True
            found = re.search(r"\((.*)\)$", name)
            event.module = found[1] if found else event.module or ""  # without a name it is the root's
        elif name.startswith(SENDS):
            event.sends = True
        elif name.startswith(NODE):
            event.phase = event.phase or "backward"  # a thread of autograd's own
            number = event.args.get("Sequence number", -1)
            event.module = GRADIENTS if name.endswith("AccumulateGrad") else made_by.get(number, event.module)
        elif event.phase == "forward" and (number := event.args.get("Sequence number", -1)) >= 0:
            # The last operator that is numbered so is the one that has made the node.
            made_by[number] = LOSS if event.module is None else event.module
        if event.step is None:
            event.step = next((int(p.name.removeprefix(STEP)) for p in periods if p.start <= event.start < p.end), None)


def _cut(event: Event, end: float) -> None:
    """A range may begin inside of an event and outlive it: the call of an operator that opens the range, under a
    dispatch mode. Where it begins, the event is over."""
    if event.parent is not None:
        event.parent.inside -= event.end - end
    event.end = end


def _add(figures: Figures, event: Event, seconds: float) -> None:
    kind = event.kind
    figures.kinds[kind] = figures.kinds.get(kind, 0.0) + seconds
    if event.is_operator:
        calls = figures.operators.setdefault(event.name, [0, 0.0])
        calls[0] += 1
        calls[1] += seconds
    else:
        figures.between[kind] = figures.between.get(kind, 0.0) + seconds
    if kind in COMPUTE:
        module = event.module if event.module is not None else LOSS if event.phase == "forward" else ELSEWHERE
        share = figures.modules.setdefault(module, {})
        share[kind] = share.get(kind, 0.0) + seconds
    elif kind == OVERHEAD:
        what = f"{event.phase or 'the loop'}: {event.name if event.is_operator else 'Python'}"
        figures.overhead[what] = figures.overhead.get(what, 0.0) + seconds


def _by_device(
    figures: Figures, device: Sequence[Event], host: Sequence[Event], periods: Sequence[Event], main: Sequence[Event]
) -> None:
    """Each instant goes to a kernel that computes, else to one that sends, else to what the host did: waiting for data,
    our own work; the rest is idle, since a kernel is yet to be launched."""
    launched = {event.args["External id"]: event for event in host if "External id" in event.args}
    for kernel in device:
        by = launched.get(kernel.args.get("External id"))
        kernel.phase, kernel.module = (by.phase, by.module) if by else (None, None)
        kernel.again = bool(by and by.again)
        # Of FSDP, copies are kernels of their own, which compute nothing of the model.
        kernel.sends = bool(by and by.sends) or "Collective name" in kernel.args or kernel.name.startswith("nccl")
    own = [event for event in main if event.kind in ("data", *APART)]
    for period in periods:
        within = [kernel for kernel in device if kernel.end > period.start and kernel.start < period.end]
        for event, start, end in _share(period, within, [event for event in own if event.step == period.step]):
            if event is None:
                figures.kinds[IDLE] = figures.kinds.get(IDLE, 0.0) + (end - start) / 1e6
            elif event in own:
                figures.kinds[event.kind] = figures.kinds.get(event.kind, 0.0) + (end - start) / 1e6
            else:
                _add(figures, event, (end - start) / 1e6)


def _share(
    period: Event, kernels: Sequence[Event], host: Sequence[Event]
) -> Iterable[tuple[Event | None, float, float]]:
    """Stretches of a step, each with the one event that it is counted for."""
    edges = sorted({period.start, period.end, *(t for e in (*kernels, *host) for t in (e.start, e.end))})
    edges = [edge for edge in edges if period.start <= edge <= period.end]
    active: list[Event] = []
    waiting = sorted((*kernels, *host), key=lambda event: event.start)
    at = 0
    hosts = set(map(id, host))
    for start, end in pairwise(edges):
        while at < len(waiting) and waiting[at].start <= start:
            active.append(waiting[at])
            at += 1
        active = [event for event in active if event.end > start]
        rank = min(active, key=lambda event: (id(event) in hosts, event.sends, -event.start), default=None)
        yield rank, start, end


# ---- waits


def _waits(threads: Mapping[Any, Sequence[Event]], main: Any) -> list[Wait]:
    """The longest stretches in which the host did nothing but wait: for a collective, for data, for the device."""
    issued = [e for e in threads[main] if e.name.startswith("c10d::") and (e.parent is None or not _is_sent(e.parent))]
    runs = sorted(
        (e for thread, events in threads.items() if thread != main for e in events if e.name.startswith("gloo:")),
        key=lambda event: event.start,
    )
    # gloo starts them in the order in which they are issued.
    by_run = dict(zip(map(id, runs), issued, strict=True)) if len(runs) == len(issued) else {}
    runs.sort(key=lambda event: event.end)
    ends, starts = [event.end for event in runs], [event.start for event in issued]
    waits = []
    for event in (event for events in threads.values() for event in events if event.step is not None):
        if event.time < LEAST_WAIT:
            continue
        if event.name == WAIT:
            last = bisect_left(ends, event.end + LEAST_WAIT) - 1  # it ended, and so did the wait
            sent = by_run.get(id(runs[last])) if last >= 0 and ends[last] >= event.start else None
            if sent is None and (before := bisect_left(starts, event.start) - 1) >= 0:
                sent = issued[before]
            waits.append(_wait_for(event, sent))
        elif event.name == MARK + "data":
            waits.append(Wait(event.time / 1e6, "data", "", None, event.step or 0, "data"))
        elif event.name.endswith(SYNCS) and not (event.parent and event.parent.name.endswith(SYNCS)):
            waits.append(
                Wait(event.time / 1e6, event.name, event.module or "", None, event.step or 0, event.phase or "")
            )
    return sorted(waits, key=lambda wait: -wait.seconds)[:LONGEST]


def _is_sent(event: Event) -> bool:
    return event.name.startswith(SENDS)


def _wait_for(wait: Event, sent: Event | None) -> Wait:
    phase, step = wait.phase or "", wait.step or 0
    if sent is None:
        return Wait(wait.time / 1e6, "a collective", wait.module or "", None, step, phase)
    name = sent.name.removeprefix("c10d::")
    module = sent.module if sent.module is not None else wait.module
    named = "the model" if module == "" else module or ""  # its root, which FSDP gathers apart from blocks
    return Wait(wait.time / 1e6, NAMES.get(name, name), named, _bytes(sent), step, phase)


def _bytes(sent: Event) -> int | None:
    """What this rank puts in: the second tensor of a collective that has an output of its own, else the first."""
    sizes = []
    for shape, kind in zip(sent.args.get("Input Dims", ()), sent.args.get("Input type", ()), strict=False):
        if kind in ITEMSIZE and shape:
            sizes.append(ITEMSIZE[kind] * _product(shape))
        elif kind == "TensorList":
            sizes.append(4 * sum(_product(each) for each in shape))  # a list does not tell its type
    if not sizes:
        return None
    return sizes[1] if len(sizes) > 1 and "base" in sent.name else sizes[0]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= int(size)
    return result
