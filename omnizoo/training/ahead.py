"""The next step's data is made ready while this one is trained on: in a thread, over a process group of its own.

The thread takes what loader workers have read, deals it out among the ranks and pins it. Without workers
(`data.workers: 0`) rows are read and decoded in the main thread, between two steps: Python code in a thread would hold
up the one that launches kernels, and the bounds on chat templates (data/limits.py) are those of a whole process.
"""

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from omnizoo.data.loader import Loader
from omnizoo.parallel.agree import agree
from omnizoo.parallel.exchange import group_of_thread
from omnizoo.training.losses import Objective
from omnizoo.training.step import StepData, StepRead, deal_step, read_step

PATIENCE = 60.0  # seconds that the end of a run waits for a step that nobody will train on
PATIENCE_AFTER_ERROR = 3.0

Read = tuple[StepRead, dict[str, Any]]  # and the state of the loader after it


class Ahead:
    """`next()` for `steps` steps, of which it never reads more. Every rank must ask for each step."""

    def __init__(self, loader: Loader, objective: Objective, steps: int) -> None:
        self.loader, self.objective, self.left = loader, objective, steps
        self.state: dict[str, Any] = {}  # of the loader, after the step that was handed out last
        self.is_working = False
        self._group = group_of_thread()
        self._asked: queue.SimpleQueue[Callable[[], Read] | None] = queue.SimpleQueue()  # None: that is all
        self._made: queue.SimpleQueue[tuple[StepData, dict[str, Any]] | BaseException] = queue.SimpleQueue()
        agree(objective.mesh, loader.start)
        threads = torch.get_num_threads()
        ready = threading.Event()
        # A daemon: it may be waiting for a rank that is gone.
        self._thread = threading.Thread(target=self._work, args=(ready,), name="data", daemon=True)
        self._thread.start()
        ready.wait()
        torch.set_num_threads(threads)  # of threads to come; the one that has just started keeps its own
        self._ask()

    def next(self) -> StepData:
        """The next step's data; an error in making them is raised here."""
        assert self.is_working, "asked for more steps than there are"
        with self.objective.mark("data"):
            made = self._made.get()
            self.is_working = False
            if isinstance(made, BaseException):
                raise made
            data, self.state = made
            self._ask()
        return data

    @property
    def thread(self) -> int | None:
        """Of which the system counts the CPU time."""
        return self._thread.ident

    def _ask(self) -> None:
        if not self.left:
            return
        self.left -= 1
        self.is_working = True
        try:
            read = None if self.loader.workers else self._read()
            self._asked.put(lambda: read or self._read())
        except Exception as error:  # noqa: BLE001 (of the step to come: this one can still be trained on)
            self._made.put(error)

    def _read(self) -> Read:
        return read_step(self.loader), self.loader.state_dict()

    def _work(self, ready: threading.Event) -> None:
        torch.set_num_threads(1)  # else it would start as many threads again as the main thread computes with
        ready.set()
        while (read := self._asked.get()) is not None:
            try:
                step, state = read()
                self._made.put((deal_step(step, self.objective, self._group), state))
            except BaseException as error:  # noqa: BLE001 (raised by `next`)
                self._made.put(error)

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All ranks stop at the same step, so what the thread has begun comes to an end; unless a rank is gone."""
        patience = PATIENCE if error is None else PATIENCE_AFTER_ERROR
        if self.is_working:
            try:
                self._made.get(timeout=patience)
            except queue.Empty:
                return
        self._asked.put(None)
        # A thread that still lets go of tensors or groups while the interpreter ends would abort the process.
        self._thread.join(patience)
        self.loader.close()
