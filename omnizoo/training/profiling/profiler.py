"""Profiler of the steps in `log.profile`, such as `10:12`. It writes a trace and a summary to the run folder.

While it records, the phases of a step and the forward passes of modules are named ranges. All hooks are removed
afterwards, so profiling changes neither losses nor later steps.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

from omnizoo.config.errors import named_line
from omnizoo.ops.compiled_blocks import is_compiled
from omnizoo.ops.device import is_host
from omnizoo.ops.torch_private import named_range, runs_as_graph
from omnizoo.reporting.run_folder import RunFolder, replace_file
from omnizoo.training.objective import Objective
from omnizoo.training.profiling.summary import MODULE, PHASE, STEP, summarize


class Profiler:
    """Context manager around the steps of a run. The loop calls `after(step)` at the end of each step."""

    def __init__(
        self,
        run: RunFolder,
        objective: Objective,
        print_line: Callable[[str], None],
        start: int,
    ) -> None:
        """Prepare to record the steps of `log.profile`.

        Args:
            run: The run folder.
            objective: The objective of the run. Its `phases` mark each phase of a step.
            print_line: Prints a line on rank 0.
            start: Number of steps done before this process started; 0 for a new run.
        """
        mesh, settings = objective.mesh, objective.config.log
        is_recording_rank = mesh.is_first or settings.profile_ranks == "all"
        steps = settings.profiled if is_recording_rank else None
        self._steps = steps or range(0)
        self._start = start
        self._objective = objective
        self._print_line = print_line
        self._folder = run.profile
        self._trace_file = self._folder / f"trace.rank{mesh.rank}.json.gz"
        self._recording: ExitStack | None = None
        self._step_range = ExitStack()
        self._open_phases: list[str] = []

    def __enter__(self) -> "Profiler":
        self.after(self._start)
        return self

    def after(self, step: int) -> None:
        """Begin, continue or end the recording after `step`."""
        self._step_range.close()
        if step + 1 in self._steps:
            if self._recording is None:
                self._recording = self._start_recording()
            self._step_range.enter_context(named_range(f"{STEP}{step + 1}"))
        elif self._recording is not None:
            self._finish()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._step_range.close()
        if self._recording is None:
            return
        if kind is None:  # the run ended before the last step of `log.profile`
            self._finish()
        else:
            self._recording.close()

    def _start_recording(self) -> ExitStack:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keeps torch 2.13 from printing to stderr
        self._profile = profile(activities=recorded_activities(self._objective.mesh.device), record_shapes=True)
        recording = ExitStack()
        recording.enter_context(patch.object(self._objective.phases, "enter", self._name_phase))
        recording.enter_context(named_modules(self._objective.model))
        recording.enter_context(self._profile)
        return recording

    @contextmanager
    def _name_phase(self, phase: str) -> Iterator[None]:
        """Context manager that opens a range named after all open phases, such as `evaluation/forward`."""
        if self._open_phases[-1:] == [phase]:
            yield
            return
        self._open_phases.append(phase)
        try:
            with named_range(PHASE + "/".join(self._open_phases)):
                yield
        finally:
            self._open_phases.pop()

    def _finish(self) -> None:
        """Write the trace of this rank; rank 0 also writes and prints the summary."""
        assert self._recording is not None
        self._recording.close()
        self._recording = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._trace_file))
            if not self._objective.mesh.is_first:
                return
            summary = summarize(self._profile.key_averages())
            replace_file(self._folder / "summary.json", summary.to_json())
        except OSError as error:  # a failed profile does not end the run
            self._print_line(f"warning: log.profile: the profile could not be written: {named_line(error)}")
            return
        for line in summary.table(self._trace_file):
            self._print_line(line)


def recorded_activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities to record: the CPU, and the device if torch can record it."""
    device_activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1)
    if is_host(device) or device_activity not in supported_activities():
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CPU, device_activity]


@contextmanager
def named_modules(model: nn.Module) -> Iterator[None]:
    """Context manager that makes the forward pass of each module a named range.

    A compiled module gets a single range, because hooks on its submodules would force a recompilation.
    """
    open_ranges: list[AbstractContextManager[Any]] = []

    def end_range(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    def add_hooks(module: nn.Module, name: str) -> None:
        def begin_range(*_: Any) -> None:
            open_ranges.append(named_range(MODULE + name))
            open_ranges[-1].__enter__()

        # The range includes all other hooks, because FSDP gathers parameters in hooks.
        hooks.callback(module.register_forward_pre_hook(begin_range, prepend=True).remove)
        hooks.callback(module.register_forward_hook(end_range, always_call=True).remove)
        if is_compiled(module) or runs_as_graph(module):
            return
        for child_name, child in module.named_children():
            add_hooks(child, f"{name}.{child_name}" if name else child_name)

    with ExitStack() as hooks:
        add_hooks(model, "")
        yield
