"""Load and redistribute the next step in a thread while the model trains on the current one.

The thread receives packs from the loader workers, redistributes them over a separate process group, and pins their
memory. Without workers (`data.workers: 0`), the main thread reads and decodes rows between two steps. A second thread
would not be suitable for this: it would delay kernel launches, and the limits on chat templates would affect the whole
process.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.step_data import StepData
from omnizoo.config.errors import UserError
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.loader import Loader
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.exchange import new_thread_group

TIMEOUT = 60.0  # seconds to wait at the end of a run for a step that is still loading
TIMEOUT_AFTER_ERROR = 3.0  # seconds to wait after an error
WAIT_SECONDS = 1.0  # while a step is loading, the main thread checks at this interval whether the run stops

Loaded = tuple[LoadedStep, dict[str, Any]]  # a step, and the state of the loader after this step


def next_step(loader: Loader, balancer: Balancer) -> StepData:
    """Load the next step and redistribute it over the ranks. Collective: all ranks must call it.

    Args:
        loader: The data loader of this rank.
        balancer: Assigns packs to ranks.

    Returns:
        The micro-batches of this rank, and totals over all ranks.

    Raises:
        UserError: If the data is unusable on any rank. The same error is raised on all ranks, so that none of them
            waits for a rank that has failed.
    """
    return balancer(load_step(loader))


def load_step(loader: Loader) -> LoadedStep:
    """Load the packs of this rank. A `UserError` is stored in the step, so that all ranks can raise it together."""
    try:
        return loader.next_step()
    except UserError as error:
        return LoadedStep(packs=[], counters=loader.counters(), error=str(error))


class Prefetcher:
    """Loads steps in advance, in a thread. `next` returns them in order.

    Use it as a context manager: its exit ends the thread. All ranks must request every step.

    Args:
        loader: The data loader of this rank.
        balancer: Assigns packs to ranks.
        num_steps: Number of steps to load.
        phases: Returns a context manager that measures the time of a named phase.
        stop_requested: Returns whether the run should stop without waiting for the next step.
    """

    def __init__(
        self,
        loader: Loader,
        balancer: Balancer,
        num_steps: int,
        phases: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loader = loader
        self.balancer = balancer
        self.phases = phases
        self.stop_requested = stop_requested
        self.num_left = num_steps
        self.state: dict[str, Any] = {}  # loader state after the last step that `next` returned
        self.is_working = False
        self._group = new_thread_group()
        self._requests: queue.SimpleQueue[Callable[[], Loaded] | None] = queue.SimpleQueue()  # None ends the thread
        self._results: queue.SimpleQueue[tuple[StepData, dict[str, Any]] | BaseException] = queue.SimpleQueue()
        sync_errors(balancer.mesh, loader.start)
        self._thread = self._start_thread()
        self._request_step()

    def next(self) -> StepData:
        """Return the next step. An error in loading the step is raised here.

        Raises:
            LoadingStopped: If a stop was requested before a rank had loaded the step. All ranks raise it, and `state`
                does not change.
        """
        assert self.is_working, "`next` was called more often than there are steps"
        with self.phases("data"):
            result = self._wait()
            self.is_working = False
            if isinstance(result, BaseException):
                raise result
            data, self.state = result
            self._request_step()
        return data

    def _wait(self) -> tuple[StepData, dict[str, Any]] | BaseException:
        """Wait for the result of the thread, and return it. If a stop is requested, make the loader stop waiting."""
        while True:
            try:
                return self._results.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                if self.stop_requested():
                    self.loader.stop()

    def _start_thread(self) -> threading.Thread:
        """Start the thread that redistributes steps."""
        num_threads = torch.get_num_threads()
        is_ready = threading.Event()
        # Use a daemon thread, because the thread may wait forever for a rank that has ended.
        thread = threading.Thread(target=self._work, args=(is_ready,), name="data", daemon=True)
        thread.start()
        is_ready.wait()
        torch.set_num_threads(num_threads)  # `_work` has changed the default for new threads; restore the default
        return thread

    def _request_step(self) -> None:
        """Request the next step from the thread, unless all steps have been requested."""
        if not self.num_left:
            return
        self.num_left -= 1
        self.is_working = True
        try:
            loaded = None if self.loader.workers else self._load()
            self._requests.put(lambda: loaded or self._load())
        except Exception as error:  # noqa: BLE001 (the next call of `next` raises it; the current step is still usable)
            self._results.put(error)

    def _load(self) -> Loaded:
        """Load the next step, and return the step with the resulting state of the loader."""
        return load_step(self.loader), self.loader.state_dict()

    def _work(self, is_ready: threading.Event) -> None:
        """Prepare requested steps until the request is None. This method runs in the thread."""
        torch.set_num_threads(1)  # otherwise, torch would start a second pool of compute threads for this thread
        is_ready.set()
        while (load := self._requests.get()) is not None:
            try:
                loaded, state = load()
                self._results.put((self.balancer(loaded, self._group), state))
            except BaseException as error:  # noqa: BLE001 (`next` raises it)
                self._results.put(error)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. All ranks stop at the same step, so the thread can finish its step unless a rank failed."""
        timeout = TIMEOUT if error is None else TIMEOUT_AFTER_ERROR
        if self._is_idle(timeout):
            self._requests.put(None)
            # Wait for the thread: if it frees tensors or process groups while Python exits, the process aborts.
            self._thread.join(timeout)
        self.loader.close()

    def _is_idle(self, timeout: float) -> bool:
        """Whether the thread finishes its current step within `timeout` seconds. The step is then discarded."""
        if not self.is_working:
            return True
        self.loader.stop()  # workers may be stuck
        try:
            self._results.get(timeout=timeout)
        except queue.Empty:
            return False
        return True
