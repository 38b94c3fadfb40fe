"""Worlds of ranks on this machine that start in a blink: forked from a server that has imported everything already.

A world for each layout, and not one for all: every process group keeps a thread awake for as long as its process lives.
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


class RankError(RuntimeError):
    """A rank ended with an error, which it has printed."""


def in_world(size: int, work: Callable[..., None], *args: Any, timeout: float = 1800.0, device: str = "cpu") -> None:
    """Run `work(process, *args)` on `size` ranks, on devices of that kind, and wait: the end of one by an error
    is the end of all.

    After `timeout` seconds without a rank coming to its end, an error says where every rank is, and all are ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    context = get_context("forkserver")
    context.set_forkserver_preload(["omnizoo.verification.trial", work.__module__])
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
    """An error that says where each rank waits; all are ended."""
    stacks = []
    for number in waiting:
        os.kill(ranks[number].pid, signal.SIGUSR1)
        ranks[number].join(1)  # it does not end: this is the time it has to write
        stacks.append(f"rank {number} waits here:\n{_stack(folder, number).read_text()}")
    for rank in ranks:
        rank.kill()
    late = f"ranks {waiting} of {len(ranks)} did not come to an end within {timeout:g} s"
    return RankError("\n".join([late, *stacks]))


def _stack(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.stack"


def _rank(rank: int, size: int, store: str, device: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()  # or every rank would warn of ids that a shrunken vocabulary lacks
    # Works while it waits inside a collective, where Python's own handlers would sleep.
    stack = _stack(os.path.dirname(store), rank).open("w")
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    try:
        with process_group((rank, size, rank), torch.distributed.FileStore(store, size), device=device) as process:
            work(process, *args)
    except BaseException:  # noqa: BLE001 - whatever it is, the rank is to end by it
        traceback.print_exc()
        os._exit(1)  # at once: others may wait for this rank, and their errors would bury its own
