"""Run a function on several ranks of this machine. Ranks are forked from a server that has already imported everything.

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
    context.set_forkserver_preload([*IMPORTED, work.__module__])
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, size, os.path.join(folder, "store"), device, work, args) for rank in range(size)]
        ranks = [context.Process(target=_rank, args=rank, daemon=True) for rank in given]
        for rank in ranks:
            rank.start()
        alive = {rank.sentinel: number for number, rank in enumerate(ranks)}
        while alive:
            ended = wait(list(alive), timeout)
            if not ended:
                raise _blocked(ranks, sorted(alive.values()), timeout, folder)
            for sentinel in ended:
                number = alive.pop(sentinel)  # type: ignore[arg-type]
                ranks[number].join()
                if ranks[number].exitcode:
                    for rank in ranks:
                        rank.kill()
                    raise RankError(f"rank {number} of {size} ended with exit code {ranks[number].exitcode}")


def _blocked(ranks: list[Any], waiting: list[int], timeout: float, folder: str) -> RankError:
    """Kill all ranks, and return an error with the stack of each rank in `waiting`."""
    stacks = []
    for number in waiting:
        os.kill(ranks[number].pid, signal.SIGUSR1)
        ranks[number].join(1)  # give the rank a second to write its stack; it does not end
        stacks.append(f"rank {number} waits here:\n{_stack(folder, number).read_text()}")
    for rank in ranks:
        rank.kill()
    late = f"ranks {waiting} of {len(ranks)} did not come to an end within {timeout:g} s"
    return RankError("\n".join([late, *stacks]))


def _stack(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.stack"


def _rank(rank: int, size: int, store: str, device: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()  # else every rank warns about ids outside the small vocabulary
    # faulthandler works while the rank waits inside a collective, where Python's signal handlers do not run.
    stack = _stack(os.path.dirname(store), rank).open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    try:
        with process_group((rank, size, rank), torch.distributed.FileStore(store, size), device=device) as process:
            work(process, *args)
    except BaseException:  # noqa: BLE001 - whatever it is, the rank is to end by it
        traceback.print_exc()
        os._exit(1)  # exit at once: other ranks may wait for this one, and their errors would hide its error
