"""A rank has failed: which one and why, in one line, with a way out where there is one."""

from omnizoo.cli.stderr import report_crash
from omnizoo.config.errors import TrainingError, UserError, first_line, is_out_of_memory, named_line


def foreseen(rank: int, error: BaseException) -> str | None:
    """The line for a failure that needs no traceback: memory ran out, or a loader worker is gone. Else None."""
    if is_out_of_memory(error):
        return (
            f"rank {rank} is out of memory ({first_line(error)}): lower data.pack_tokens or train.micro_batch, set "
            "parallel.recompute: full, or share the model among more ranks (parallel.dp_shard)"
        )
    from omnizoo.data.workers import WorkerDeath

    return f"rank {rank}: {error}" if isinstance(error, WorkerDeath) else None


def report_failure(rank: int, error: BaseException) -> None:
    """Tell our launcher, at once: what other ranks fail with afterwards is only that this one is gone."""
    if isinstance(error, Exception) and not isinstance(error, UserError | TrainingError):
        report_crash(foreseen(rank, error) or f"rank {rank} failed: {named_line(error)}")
