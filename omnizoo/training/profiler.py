"""`log.profile: 10:12`: records those steps on every rank, and leaves a trace, a page and a summary in the run folder.

It only watches: ranges are named while modules, waits and phases go by, and everything that is hung on the model or on
torch for this is taken off again. The training loop calls `after` once a step, in one place.
"""

import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from types import TracebackType
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from omnizoo.config.errors import named_line
from omnizoo.config.schema import Config
from omnizoo.ops.device import is_host
from omnizoo.ops.graphs import is_compiled
from omnizoo.ops.torch_private import named_range, runs_as_graph
from omnizoo.parallel.waits import named_waits
from omnizoo.training.ahead import Ahead
from omnizoo.training.losses import Objective
from omnizoo.training.metrics import RunFolder, replace_file
from omnizoo.training.profile_page import write_page
from omnizoo.training.profile_summary import summarise, tell
from omnizoo.training.profile_trace import MARK, MODULE, STEP, WAIT, Figures, read_trace


@dataclass
class Spent:
    """By phase of the step, without the phases inside of it."""

    wall: float = 0.0
    cpu: float = 0.0  # of all threads of this process
    thread: float = 0.0  # of the one that trains


@dataclass
class Clocks:
    """CPU seconds since some moment of this process's threads, and of its loader workers."""

    process: float
    main: float
    data: float
    workers: float

    @classmethod
    def read(cls, data_thread: int | None) -> "Clocks":
        data = time.clock_gettime(time.pthread_getcpuclockid(data_thread)) if data_thread else 0.0
        workers = 0.0
        for child in psutil.Process().children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.Error:  # gone meanwhile
                continue
            workers += times.user + times.system
        return cls(time.process_time(), time.thread_time(), data, workers)

    def since(self, before: "Clocks") -> dict[str, float]:
        return {name: value - asdict(before)[name] for name, value in asdict(self).items()}


@dataclass
class Ledger:
    """Wall and CPU time of phases. Only the thread that trains has any."""

    spent: dict[str, Spent] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    thread: int = 0

    def turn(self, phase: str | None) -> None:
        """The current phase ends or is interrupted; `phase` begins, or None: the one around it goes on."""
        now = (time.perf_counter(), time.process_time(), time.thread_time())
        if self.stack:
            spent = self.spent.setdefault(self.stack[-1], Spent())
            spent.wall += now[0] - self.at[0]
            spent.cpu += now[1] - self.at[1]
            spent.thread += now[2] - self.at[2]
        self.at = now
        if phase is None:
            self.stack.pop()
        else:
            self.stack.append(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if get_ident() != self.thread:
            yield
            return
        self.turn(name)
        try:
            with named_range(MARK + name):
                yield
        finally:
            self.turn(None)


class Profiler:
    """`with Profiler(...) as profiler`, and `profiler.after(step)` when a step is over, on all ranks."""

    def __init__(
        self, config: Config, run: RunFolder, objective: Objective, ahead: Ahead, say: Callable[[str], None], start: int
    ) -> None:
        """`start`: the step that the run goes on from."""
        self.steps = config.log.profiled or range(0)
        self.keeps = objective.mesh.is_first or config.log.profile_ranks == "all"
        self.folder, self.objective, self.ahead, self.say = run.profile, objective, ahead, say
        self.start, self.done = start, 0
        self._recording: ExitStack | None = None
        self._step: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> "Profiler":
        if self.start < self.steps.stop - 1 and self.start + 1 >= self.steps.start:
            self._begin(self.start + 1)
        return self

    def after(self, step: int) -> None:
        if self._recording is not None:
            self._end_step()
            if step + 1 in self.steps:
                self._begin_step(step + 1)
            else:
                self._finish()
        elif step + 1 == self.steps.start:
            self._begin(step + 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recording is None:
            return
        if error is None:  # the run ends within the steps that are recorded
            self._end_step()
            self._finish()
        else:
            self._step.__exit__(None, None, None)
            self._recording.close()

    def _begin(self, step: int) -> None:
        self._recording = stack = ExitStack()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.13 tells stderr that it starts and stops
        self._ledger = Ledger(thread=get_ident())
        self._data_thread = self.ahead.thread
        self._profile = profile(activities=activities(self.objective.mesh.device), record_shapes=True)
        # Hooks first: what is being put up is not of a step.
        stack.enter_context(patch.object(self.objective, "mark", self._ledger.phase))
        stack.enter_context(named_modules(self.objective.model))
        stack.enter_context(named_waits(lambda: named_range(WAIT)))
        stack.enter_context(self._profile)
        self._clocks = Clocks.read(self._data_thread)
        self._begin_step(step)

    def _begin_step(self, step: int) -> None:
        self._ledger.turn("overhead")
        self._step = named_range(f"{STEP}{step}")
        self._step.__enter__()

    def _end_step(self) -> None:
        self._step.__exit__(None, None, None)
        self._ledger.turn(None)
        self.done += 1

    def _finish(self) -> None:
        """Read what was recorded, on every rank; the first one writes about all of them."""
        clocks = Clocks.read(self._data_thread).since(self._clocks)
        assert self._recording is not None
        self._recording.close()
        self._recording = None
        mesh = self.objective.mesh
        own: dict[str, Any] = {"rank": mesh.rank, "clocks": clocks, "failure": None}
        try:
            own |= asdict(self._read())
        except OSError as error:  # what is written about a run is not worth the run
            own["failure"] = named_line(error)
        if mesh.is_first:
            own["phases"] = {name: asdict(spent) for name, spent in self._ledger.spent.items()}
        else:
            own = {key: value for key, value in own.items() if key not in ("modules", "operators", "overhead")}
        ranks = mesh.gather(own)
        if mesh.is_first:
            try:
                if failed := next((rank["failure"] for rank in ranks if rank["failure"]), None):
                    raise OSError(failed)
                summary = summarise(ranks, str(mesh.layout))
                replace_file(self.folder / "summary.json", json.dumps(summary, indent=1))
                page = write_page(self.folder / "profile.html", self.folder.parent.resolve().name, summary)
            except OSError as error:
                self.say(f"warning: log.profile: no profile of this run: {named_line(error)}")
                return
            for line in tell(summary, page):
                self.say(line)

    def _read(self) -> Figures:
        """What was recorded on this rank; its trace is kept if asked for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.folder) as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            if self.keeps:
                with open(file, "rb") as raw, gzip.open(file.with_suffix(".gz"), "wb", compresslevel=4) as packed:
                    shutil.copyfileobj(raw, packed, 2**20)
                file.with_suffix(".gz").replace(self.folder / f"trace.rank{self.objective.mesh.rank}.json.gz")
            return read_trace(json.loads(file.read_bytes()))


def activities(device: torch.device) -> list[ProfilerActivity]:
    """The host, and the device if torch can record it."""
    own = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    is_recorded = not is_host(device) and own in supported_activities()
    return [ProfilerActivity.CPU, *([own] if is_recorded else [])]


@contextmanager
def named_modules(model: nn.Module) -> Iterator[None]:
    """For the length of the block, every module's forward pass is a range with its name. Not inside of what is
    compiled, which a hook would have compiled anew."""
    open_ranges: list[AbstractContextManager[Any]] = []
    with ExitStack() as hooks:

        def watch(module: nn.Module, name: str) -> None:
            def begin(*_: Any) -> None:
                entered = named_range(MODULE + name)
                entered.__enter__()
                open_ranges.append(entered)

            def end(*_: Any) -> None:
                open_ranges.pop().__exit__(None, None, None)

            # Around all other hooks: FSDP gathers in them.
            hooks.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
            if not is_compiled(module) and not runs_as_graph(module):
                for child, below in module.named_children():
                    watch(below, f"{name}.{child}" if name else child)

        watch(model, "")
        yield
