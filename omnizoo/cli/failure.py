"""A rank has failed: which one and why, in one line, with a way out where there is one."""

from omnizoo.cli.report import report_crash
from omnizoo.config.errors import TrainingError, UserError, is_out_of_memory


def foreseen(rank: int, error: BaseException) -> str | None:
    """The line for a failure that needs no traceback: memory ran out, or a loader worker is gone. Else None."""
    if is_out_of_memory(error):
        return (
            f"rank {rank} is out of memory ({_first_line(error)}): lower data.pack_tokens or train.micro_batch, set "
            "parallel.recompute: full, or share the model among more ranks (parallel.dp_shard)"
        )
    from omnizoo.data.loader import worker_death

    death = worker_death(error)
    return None if death is None else f"rank {rank}: {death}"


def report_failure(rank: int, error: BaseException) -> None:
    """Tell our launcher, at once: what other ranks fail with afterwards is only that this one is gone."""
    if isinstance(error, Exception) and not isinstance(error, UserError | TrainingError):
        report_crash(foreseen(rank, error) or f"rank {rank} failed: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """Of what the error says; of an error in a loader worker, which comes with its traceback, the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    line = lines[-1] if lines[0].startswith("Caught ") else lines[0]
    return line if len(line) <= 200 else line[:197] + "..."
