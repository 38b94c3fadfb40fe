"""The store that ranks connect through, and messages about ranks that have not joined yet."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from omnizoo.config.errors import TrainingError, first_line
from omnizoo.parallel.rendezvous import meeting_point

JOIN_TIMEOUT = 300.0  # seconds
FIRST_MESSAGE = 10.0  # seconds until the first message about missing ranks; each later message waits twice as long
WAIT_SECONDS = 1.0  # time between two checks whether to stop
MAX_LISTED = 8  # ranges of ranks in a message
ALL_JOINED = "all joined"  # a key of the store
HINT = "Start it with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and check that its machine can connect."


def open_store(
    rank: int, world_size: int, timeout: float = JOIN_TIMEOUT, stop_requested: Callable[[], bool] = lambda: False
) -> dist.Store:
    """Connect to the store at `MASTER_ADDR` and `MASTER_PORT`, and wait until all ranks have done so.

    Collective: all ranks must call it. A waiting rank prints at intervals which ranks are missing.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks. A single rank uses an in-memory store.
        timeout: Seconds to wait for the other ranks.
        stop_requested: Returns whether to stop waiting.

    Returns:
        The store.

    Raises:
        UserError: If the address is not set.
        TrainingError: If a rank does not join in time, or if a stop is requested.
    """
    if world_size == 1:
        return dist.HashStore()
    host, port = meeting_point(world_size)
    waiting = _Waiting(rank, world_size, f"{host}:{port}", timeout, stop_requested)
    store = _connect(waiting, host, port)
    # After a restart by torchrun the store still contains the keys of the killed attempt. A prefix separates attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt{attempt}", store)
    try:
        _wait_for_ranks(waiting, store)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TrainingError(
            f"MASTER_ADDR: the connection of rank {rank} to {waiting.where} was lost ({error})"
        ) from None
    return store


@dataclass
class _Waiting:
    """The state of a rank that waits for others: when to print the next message, and when to stop waiting."""

    rank: int
    world_size: int
    where: str  # host and port of the store
    timeout: float
    stop_requested: Callable[[], bool]
    started: float = field(default_factory=time.monotonic)
    next_message: float = field(default_factory=lambda: FIRST_MESSAGE)

    def check(self, missing: Callable[[], Sequence[int]]) -> None:
        """Print a message about the missing ranks if one is due.

        Raises:
            TrainingError: If time is up, or a stop is requested.
        """
        seconds = time.monotonic() - self.started
        if self.stop_requested():
            raise TrainingError(f"stopped by a signal while rank {self.rank} waited for {self._name(missing())}")
        if seconds >= self.timeout:
            raise TrainingError(
                f"parallel.join_timeout: {self._name(missing())} did not connect to {self.where} within "
                f"{self.timeout:g} s. {HINT}"
            )
        if seconds >= self.next_message:
            self.next_message *= 2
            ranks = missing()
            # Several ranks may know which ranks are missing. The lowest of them reports the missing ranks.
            is_reporter = all(rank in ranks for rank in range(self.rank))
            if ranks and is_reporter:
                limit = f"{seconds:.0f} s of at most {self.timeout:g} s"
                print(
                    f"rank {self.rank} of {self.world_size} on {socket.gethostname()} waits for {self._name(ranks)} at "
                    f"{self.where} ({limit}). {HINT}",
                    file=sys.stderr,
                    flush=True,
                )

    def _name(self, ranks: Sequence[int]) -> str:
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}" if ranks else "the other ranks"


def _connect(waiting: _Waiting, host: str, port: int) -> dist.Store:
    """Return the TCP store. Rank 0 hosts it, unless torchrun does."""
    listening_socket = os.environ.get("OMNIZOO_STORE_FD")
    is_hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    result: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            store = dist.TCPStore(
                host,
                port,
                waiting.world_size,
                is_master=waiting.rank == 0 and not is_hosted_by_torchrun,
                timeout=timedelta(seconds=2 * waiting.timeout + 60),  # `waiting.check` raises an error earlier
                wait_for_workers=False,
                master_listen_fd=None if listening_socket is None else int(listening_socket),
            )
            result.set_result(store)
        except Exception as error:  # noqa: BLE001 (raised by `result`)
            result.set_exception(error)

    # Connecting waits for rank 0 in native code, which signals do not interrupt.
    threading.Thread(target=connect, name="connect", daemon=True).start()
    while True:
        with suppress(TimeoutError):
            try:
                return result.result(WAIT_SECONDS)
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                raise TrainingError(
                    f"MASTER_ADDR: rank {waiting.rank} cannot connect to rank 0 at {waiting.where} "
                    f"({first_line(error)}). {HINT}"
                ) from None
        waiting.check(lambda: [0])


def _wait_for_ranks(waiting: _Waiting, store: dist.Store) -> None:
    """Wait until all ranks have called this function with the same store."""
    store.set(_key(waiting.rank), "")
    if store.add("number of ranks", 1) == waiting.world_size:
        store.set(ALL_JOINED, "")

    def missing() -> list[int]:
        return [rank for rank in range(waiting.world_size) if not store.check([_key(rank)])]

    pause = 0.005
    while not store.check([ALL_JOINED]):  # `store.wait` logs each timeout
        time.sleep(pause)
        pause = min(2 * pause, WAIT_SECONDS)
        waiting.check(missing)


def _key(rank: int) -> str:
    return f"rank {rank}"


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: `1, 4-7` for 1, 4, 5, 6 and 7. A long list is cut."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    texts = ["-".join(map(str, part)) for part in parts[:MAX_LISTED]]
    rest = ["..."] if len(parts) > MAX_LISTED else []
    return ", ".join(texts + rest)
