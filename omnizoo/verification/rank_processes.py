"""Run a function on several ranks of this machine. Ranks are forked from a server that has imported all modules.

Each layout gets new processes, because every process group keeps a thread running until its process ends.
"""

import faulthandler
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from omnizoo.parallel.parent_death import set_server_imports
from omnizoo.parallel.process import process_group

IMPORTED = ["omnizoo.verification.trial"]  # modules that the fork server imports


class RankError(RuntimeError):
    """Raised if a rank failed, after it has printed its traceback, or if ranks did not finish in time."""


def run_in_processes(
    size: int, work: Callable[..., None], *args: Any, timeout: float = 1800.0, device: str = "cpu"
) -> None:
    """Run `work(process, *args)` on `size` ranks and wait for all of them.

    Args:
        size: Number of ranks.
        work: Function to run; it must be picklable.
        *args: Arguments of `work` after the process.
        timeout: Seconds to wait for the next rank to finish.
        device: Device type of the ranks.

    Raises:
        RankError: If a rank fails, or if no rank finishes within `timeout` seconds. All ranks are killed. After a
            timeout, the message contains the stack of every remaining rank.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    context = get_context("forkserver")
    set_server_imports([*IMPORTED, work.__module__])
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = []
        for rank in range(size):
            rank_args = (rank, size, store, device, work, args)
            processes.append(context.Process(target=_run_rank, args=rank_args, daemon=True))
        for process in processes:
            process.start()

        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        while running:
            ended = wait(list(running), timeout)
            if not ended:
                raise _timeout_error(processes, sorted(running.values()), timeout, folder)
            for sentinel in ended:
                rank = running.pop(sentinel)  # type: ignore[arg-type]
                processes[rank].join()
                if processes[rank].exitcode:
                    for process in processes:
                        process.kill()
                    raise RankError(f"rank {rank} of {size} ended with exit code {processes[rank].exitcode}")


def _timeout_error(processes: list[Any], running: list[int], timeout: float, folder: str) -> RankError:
    """Kill all ranks, and return an error with the stack of each rank in `running`."""
    stacks = []
    for rank in running:
        os.kill(processes[rank].pid, signal.SIGUSR1)
        processes[rank].join(1)  # the signal does not end the rank; wait a second while the rank writes its stack
        stacks.append(f"stack of rank {rank}:\n{_stack_file(folder, rank).read_text()}")
    for process in processes:
        process.kill()
    message = f"ranks {running} of {len(processes)} did not finish within {timeout:g} s"
    return RankError("\n".join([message, *stacks]))


def _stack_file(folder: str, rank: int) -> Path:
    """Return the file that a rank writes its stack to."""
    return Path(folder) / f"rank{rank}.stack"


def _run_rank(rank: int, size: int, store: str, device: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run `work` on one rank, in a new process."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()  # otherwise, all ranks would warn about ids outside the small vocabulary
    # faulthandler works while the rank waits inside a collective, where Python's signal handlers do not run.
    stack_file = _stack_file(os.path.dirname(store), rank).open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    try:
        with process_group((rank, size, rank), torch.distributed.FileStore(store, size), device=device) as process:
            work(process, *args)
    except BaseException:  # noqa: BLE001 - any error ends the rank
        traceback.print_exc()
        os._exit(1)  # exit now, because other ranks may wait for this one, and their errors would hide this error
