"""One-line messages about failed ranks: which rank failed, why, and what to do about it."""

import signal
from collections.abc import Sequence

from omnizoo.config.errors import TrainingError, UserError, first_line, is_out_of_memory, named_line
from omnizoo.launch.stderr import report_crash
from omnizoo.launch.system_limits import explain_limit

USER_ERROR = 2  # exit code of a rank that has raised a `UserError`


def expected_failure(rank: int, error: BaseException) -> str | None:
    """Return a message if `error` needs no traceback, otherwise None.

    Errors of this kind: the device or the machine is out of memory, another limit of the system is reached, or a loader
    worker has died.
    """
    if is_out_of_memory(error):
        return (
            f"rank {rank} is out of memory ({first_line(error)}). Lower data.pack_tokens or train.micro_batch, set "
            "parallel.recompute: full, or shard the model over more ranks (parallel.dp_shard)."
        )
    from omnizoo.data.loading.workers import WorkerDeath

    message = str(error) if isinstance(error, WorkerDeath) else explain_limit(error)
    return f"rank {rank}: {message}" if message else None


def report_failure(rank: int, error: BaseException) -> None:
    """Report a crash to the launcher immediately, because later failures of other ranks are only consequences."""
    if isinstance(error, Exception) and not isinstance(error, UserError | TrainingError):
        report_crash(expected_failure(rank, error) or f"rank {rank} failed: {named_line(error)}")


def first_failure(failures: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the rank and exit code of the failure that caused the others.

    Args:
        failures: The number and exit code of every failed rank, in the order in which they ended.
    """

    def priority(failure: tuple[int, int]) -> int:
        code = failure[1]
        if code == USER_ERROR:
            return 0
        # SIGABRT does not count as an external signal, because a rank may abort when another rank has ended.
        is_external_signal = code > 128 and code != 128 + signal.SIGABRT
        return 1 if is_external_signal else 2

    return min(failures, key=priority)  # the earliest failure of the highest priority


def failure_message(rank: int, code: int, crashes: Sequence[str], has_printed: bool) -> str | None:
    """Return the line that the launcher prints about the first failure; None if a rank has printed one."""
    has_reported_abort = code == 128 + signal.SIGABRT and bool(crashes)
    if code > 128 and not has_reported_abort:
        hint = " (out of memory?)" if code == 128 + signal.SIGKILL else ""
        return f"rank {rank} was killed by {signal.Signals(code - 128).name}{hint}"
    if has_printed:
        return None
    if crashes:
        return crashes[0]  # later crashes are only consequences
    return f"rank {rank} exited with code {code}"
