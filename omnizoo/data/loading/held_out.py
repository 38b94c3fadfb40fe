"""Read held-out data (`data.eval_sources`). Each source is read separately, in file order and at most once."""

import itertools
import logging
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.sections.data import SourceSettings, with_weights
from omnizoo.data.loading.lanes import Lane, shares_of
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.loading.reader import Reader
from omnizoo.data.packing.pack import Pack
from omnizoo.data.row import stop_message

log = logging.getLogger(__name__)


def held_out_config(config: Config) -> Config:
    """Return a config that reads `data.eval_sources` instead of `data.sources`, in file order and in one lane."""
    sources = with_weights(config.data.eval_sources)  # without weights, all sources get the same number of packs
    return config.changed(data={"sources": sources, "eval_sources": sources, "lanes": 1, "shuffle": False})


def held_out_parts(reader: Reader) -> dict[str, Reader]:
    """Split a reader of held-out data into one reader for each source, so that losses can be reported by source.

    `evaluation.packs` is divided among the sources in proportion to their weights.

    Args:
        reader: A reader with the config from `held_out_config`.

    Returns:
        The readers, keyed by the short name of the source. If there is only one source, or if the KTO baseline pairs
        prompts with responses of other rows, the only entry is the whole reader with the key "".
    """
    config = reader.config
    specs = reader.config.data.sources
    if len(specs) == 1 or config.mismatched_answers:
        return {"": reader}
    shares = shares_of(reader, by_rows=False)
    parts = {}
    for number, (name, spec) in enumerate(zip(short_names(specs), specs, strict=True)):
        packs = max(1, round(config.evaluation.packs * shares[number]))
        part_config = config.changed(data={"sources": [spec]}, evaluation={"packs": packs})
        renderer = copy(reader.renderer)
        renderer.schemas = [reader.renderer.schema(number)]
        parts[name] = replace(reader, config=part_config, sources=[reader.sources[number]], renderer=renderer)
    return parts


def short_names(specs: Sequence[SourceSettings], taken: Sequence[str] = ()) -> list[str]:
    """Return a short name of each source for the names of metrics: the file name without folder and suffix.

    Repeated names, and names in `taken`, get a number, such as `books_2`.
    """
    counts: dict[str, int] = dict.fromkeys(taken, 1)
    names = []
    for spec in specs:
        file_name = spec.name.rstrip("/").rpartition("/")[2].rpartition(":")[2]
        name = re.sub(r"[^\w.-]", "_", file_name.partition(".")[0])
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return names


def read_held_out(reader: Reader, rank: int, world: int) -> list[Pack]:
    """Return this rank's part of the first `evaluation.packs` packs of held-out data.

    There are fewer packs if the data ends earlier, because each row is read at most once.

    Args:
        reader: One of the readers from `held_out_parts`.
        rank: This rank.
        world: Number of ranks.

    Raises:
        UserError: If no row is usable, or if a row is bad and `data.on_bad_row` is `error`.
    """
    data = reader.config.data
    lane = Lane(reader, 0, epochs=1)
    packs = []
    bad_rows = []
    num_read = 0
    for samples in itertools.islice(iter(lane.next_pack, None), reader.config.evaluation.packs):
        assert samples is not None
        if num_read % world == rank:
            pack, undecodable = prepare_pack(num_read, samples, reader)
            packs.append(pack)
            bad_rows += undecodable
        num_read += 1
    if rank == 0:
        bad_rows = lane.bad_rows + bad_rows
    if bad_rows and data.on_bad_row == "error":
        raise UserError(f"data.eval_sources: {stop_message(bad_rows[0])}")
    if bad_rows:
        log.warning("skipped %d rows of data.eval_sources; the first: %s", len(bad_rows), bad_rows[0])
    if not num_read:
        num_dropped = lane.counters.dropped_overlong + lane.counters.few_targets
        reason = ""
        if num_dropped:
            limits = f"data.pack_tokens ({data.pack_tokens}) or data.min_targets ({data.min_targets})"
            reason = f"; {num_dropped} samples were dropped because of {limits}"
        names = ", ".join(spec.name for spec in data.sources)
        raise UserError(f"data.eval_sources: {names} has no usable row{reason}")
    return packs
