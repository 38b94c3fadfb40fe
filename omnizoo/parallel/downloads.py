"""Download the repositories that a config names, on one rank of each node, while the other ranks wait."""

import threading
from collections.abc import Callable
from typing import TypeVar

from omnizoo.config.schema import Config
from omnizoo.hub.resolve import download, pin, with_values
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.mesh import Mesh

T = TypeVar("T")
FIRST_PAUSE = 0.02  # seconds between two checks whether all nodes are done; it doubles up to MAX_PAUSE
MAX_PAUSE = 5.0


def download_on_ranks(config: Config, mesh: Mesh, local_rank: int) -> Config:
    """Download the repositories that `config` names on each node, and return the config with their commits.

    Rank 0 asks the hub for the commits, so that all ranks use the same. Then the first rank of each node downloads.

    Collective: all ranks must call it.

    Raises:
        UserError: If a name cannot be resolved or downloaded on any node.
    """
    pins: dict[str, str] = mesh.from_first(sync_errors(mesh, lambda: pin(config) if mesh.is_first else None))
    if not pins:
        return config
    config = with_values(config, pins)
    folders = run_for_long(mesh, lambda: download(config) if local_rank == 0 else {})
    return with_values(config, mesh.from_first(folders))


def run_for_long(mesh: Mesh, work: Callable[[], T]) -> T:
    """Run `work` on this rank, and return its result when all ranks are done.

    A download can take longer than the timeout of a collective. The ranks therefore exchange their state repeatedly,
    while `work` runs in a thread. Collective: all ranks must call it.

    Raises:
        UserError: If `work` raised a `UserError` on any rank.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below, on the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name="download", daemon=True)
    thread.start()
    pause = FIRST_PAUSE
    while True:
        thread.join(pause)
        is_failed = bool(errors)
        running, failed = mesh.sum([thread.is_alive(), is_failed])
        if failed or not running:
            break
        pause = min(MAX_PAUSE, 2 * pause)
    return sync_errors(mesh, lambda: _result(results, errors))


def _result(results: list[T], errors: list[BaseException]) -> T:
    """Return the result of a thread, or raise its error. A thread that still runs has no result."""
    if errors:
        raise errors[0]
    return results[0] if results else None  # type: ignore[return-value] # another rank failed, so it is not used
