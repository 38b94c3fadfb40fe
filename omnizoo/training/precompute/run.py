"""Encode all rows of a run's sources with its frozen components, and write them as shards.

Each process encodes every `world`-th shard. Processes do not communicate, so any of them may be killed and started
again. On a CPU each process uses one thread, because the number of threads can change the rounding of a result.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.data.loading.reader import Reader
from omnizoo.data.row import BadRow, stop_message
from omnizoo.data.sources.base import RowSource
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.precomputed import not_finite_names
from omnizoo.ops.device import is_host
from omnizoo.training.precompute.shards import ShardFolder, tensors_of_row
from omnizoo.training.precompute.stages import LoadedStage, RowItems, Stage

DECODERS = 4  # threads that decode media
WINDOW = 6  # maximum number of decoded items in memory
EPOCH = 0  # random numbers of rows are those of the first epoch


@dataclass(frozen=True)
class Share:
    """The part of the work that a process does."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Job:
    """Precomputes one source.

    Args:
        reader: Renders rows and decodes media.
        number: Index of the source.
        folder: The folder to write.
        describe: Returns what `rows.jsonl` contains of a row, besides its number.
    """

    def __init__(
        self, reader: Reader, number: int, folder: ShardFolder, describe: Callable[[RowItems, Stage], dict[str, Any]]
    ) -> None:
        self.reader = reader
        self.number = number
        self.source: RowSource = reader.sources[number]
        self.folder = folder
        self.describe = describe
        self.skips_bad_rows = reader.config.data.on_bad_row == "skip"

    def run_shard(self, stage: Stage, loaded: LoadedStage, shard: int, advance: Callable[[int], None]) -> None:
        """Encode the rows of a shard and write it.

        Args:
            stage: The stage.
            loaded: Its components.
            shard: Number of the shard.
            advance: Called with the number of rows that are finished.

        Raises:
            UserError: If a row cannot be used and bad rows are not skipped, or the folder cannot be written.
        """
        tensors: Inputs = {}
        lines: list[dict[str, Any]] = []
        for row, inputs in self._decoded_rows(stage, shard):
            encoded = None
            if row is not None and inputs is not None:
                encoded = self._encode(stage, loaded, row, inputs)
                if encoded is not None:
                    tensors |= tensors_of_row(row.row, encoded)
                    lines.append({"row": row.row, **self.describe(row, stage)})
            advance(1)
        is_first = stage.name == self.folder.stages[0]
        self.folder.write_shard(stage.name, shard, tensors, lines if is_first else None)

    def _encode(self, stage: Stage, loaded: LoadedStage, row: RowItems, inputs: Mapping[int, Inputs]) -> Inputs | None:
        """Return the tensors of a row; None if they are not finite and bad rows are skipped."""
        encoded = loaded.encode(row, inputs)
        not_finite = not_finite_names(encoded)
        if not not_finite:
            return encoded
        reason = f"`{not_finite[0]}` of {stage.name} has values that are not finite"
        if stage.name != self.folder.stages[0]:  # the first stage has decided which rows are usable
            raise UserError(f"{self.source.where(row.row)}: {reason}. Check the weights of the component.")
        self._refuse(row.row, reason)
        return None

    def _refuse(self, row: int, reason: object) -> None:
        """Raise a `UserError` for a bad row, unless bad rows are skipped."""
        if not self.skips_bad_rows:
            raise UserError(stop_message(f"{self.source.where(row)}: {reason}"))

    def _render(self, number: int) -> RowItems | None:
        """Return the items of a row; None if the row cannot be used."""
        try:
            fields = self.source.read(number)
            key = (self.number, EPOCH, number)
            samples = self.reader.renderer.render_samples(fields, key, self.source.files(number))
        except BadRow as reason:
            self._refuse(number, reason)
            return None
        assert len(samples) == 1, "rows with preferences are refused before"
        return RowItems(number, fields, samples[0].items)

    def _decode(self, stage: Stage, row: RowItems) -> dict[int, Inputs]:
        """Decode the media of a row that a stage needs, by the index of the item."""
        decoded: dict[int, Inputs] = {}
        for index, item in enumerate(row.items):
            if stage.decodes(item):
                [prepared] = self.reader.prepare(item)
                assert prepared.inputs is not None, "`prepare` sets the inputs"
                decoded[index] = prepared.inputs
        return decoded

    def _decoded_rows(self, stage: Stage, shard: int) -> Iterator[tuple[RowItems | None, dict[int, Inputs] | None]]:
        """Yield the items of each row of a shard and its decoded media; None for bad rows.

        Media are decoded in threads, a few rows ahead.
        """
        numbers = iter(self.folder.rows_of(shard))
        waiting: deque[tuple[RowItems | None, Future[dict[int, Inputs]] | None]] = deque()
        with ThreadPoolExecutor(DECODERS) as threads:
            while True:
                for number in islice(numbers, WINDOW - len(waiting)):
                    row = self._render(number)
                    waiting.append((row, None if row is None else threads.submit(self._decode, stage, row)))
                if not waiting:
                    return
                row, future = waiting.popleft()
                if row is None or future is None:
                    yield None, None
                    continue
                try:
                    inputs = future.result()
                except BadMedia as reason:
                    self._refuse(row.row, reason)
                    yield row, None
                    continue
                yield row, inputs


def run_stages(stages: Sequence[Stage], jobs: Sequence[Job], share: Share, advance: Callable[[int], None]) -> None:
    """Encode this process's share of all shards, one stage after the other.

    Args:
        stages: The stages. Only one of them is in memory at a time.
        jobs: The sources.
        share: The part of the work of this process.
        advance: Called with the number of rows that are finished.

    Raises:
        UserError: If a row cannot be used and bad rows are not skipped, or a folder cannot be written.
    """
    if is_host(share.device):
        torch.set_num_threads(1)
    for stage in stages:
        shards = [(job, shard) for job in jobs for shard in range(job.folder.num_shards)]
        own_shards = shards[share.rank :: share.world]
        missing = [(job, shard) for job, shard in own_shards if not job.folder.is_done(stage.name, shard)]
        if not missing:
            continue
        loaded = stage.load(share.device)
        if loaded.encode_empty is not None:
            for job in jobs:
                job.folder.write_empty(stage.name, loaded.encode_empty())
        for job, shard in missing:
            job.run_shard(stage, loaded, shard, advance)
        del loaded
