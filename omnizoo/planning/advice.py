"""Find config changes that make a step fit in memory, by trying them in dry runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.parallel.layout import plan_layout
from omnizoo.planning.dry_run import Place, Result, simulate
from omnizoo.planning.memory_tracker import GRADIENTS

TILE = 8192  # tokens; enough for matmuls to run at full speed
MARGIN = 0.1  # fraction of memory reserved for the driver, collective buffers, kernel workspaces, and fragmentation


@dataclass(frozen=True)
class Advice:
    """Config changes that reduce the peak memory."""

    changes: dict[str, Any]  # config keys and their new values
    peak: int  # peak memory with these changes, in bytes

    def __str__(self) -> str:
        return ", ".join(f"{key}: {str(value).lower()}" for key, value in self.changes.items())


def usable_memory(place: Place) -> int:
    """Return the bytes of device memory that a step may use."""
    return int(place.device.memory_gb * 2**30 * (1 - MARGIN))


def advise(config: Config, place: Place, result: Result, report: Callable[[str], None]) -> list[Advice]:
    """Return the config change that saves the most memory and, if it is not enough, the best additional change.

    Args:
        config: The config that does not fit.
        place: The simulated rank and device.
        result: Result of the dry run of `config`.
        report: Called with a progress message before each dry run.

    Returns:
        At most two suggestions. The second contains the changes of the first. Empty if no change saves memory.
    """
    changes: dict[str, Any] = {}
    advice: list[Advice] = []
    for _ in range(2):
        candidates = []
        for change in possible_changes(with_changes(config, changes), place, result):
            report(f"testing {Advice(changes | change, 0)}")
            try:
                peak = simulate(with_changes(config, changes | change), place).peak.bytes
            except UserError:  # the model does not support this layout
                continue
            candidates.append(Advice(changes | change, peak))
        best = min(candidates, key=lambda candidate: candidate.peak, default=None)
        previous_peak = advice[-1].peak if advice else result.peak.bytes
        if best is None or best.peak >= previous_peak:
            return advice
        advice.append(best)
        if best.peak <= usable_memory(place):
            return advice
        changes = best.changes
    return advice


def possible_changes(config: Config, place: Place, result: Result) -> Iterator[dict[str, Any]]:
    """Yield the changes that may reduce the peak memory, as new values by config key."""
    parallel, train = config.parallel, config.train
    layout = plan_layout(parallel, place.world)
    if parallel.recompute != "full":
        yield {"parallel.recompute": "full"}
    if parallel.tile_tokens is None and config.data.pack_tokens * train.micro_batch > 2 * TILE * layout.sp:
        yield {"parallel.tile_tokens": TILE}
    if parallel.reduce_each_micro_batch is False and result.micro_batches > 1 and result.peak.parts[GRADIENTS]:
        yield {"parallel.reduce_each_micro_batch": True}
    if parallel.reshard_after_forward is False:
        yield {"parallel.reshard_after_forward": True}
    if train.micro_batch > 1:
        yield {"train.micro_batch": 1}
    if layout.dp_replicate > 1:
        yield {"parallel.dp_replicate": 1}
    for axis in ("ulysses", "ring"):
        if layout.dp_shard % 2 == 0:
            change = {f"parallel.{axis}": getattr(parallel, axis) * 2}
            if parallel.dp_shard != -1:
                change["parallel.dp_shard"] = layout.dp_shard // 2
            yield change
    if layout.ep > 1 and layout.ep_shard % 2 == 0:
        yield {"parallel.ep": layout.ep * 2}


def with_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return `config` with `changes`, a mapping from dotted keys (`section.name`) to new values."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.changed(**sections)
