"""Held-out data (`data.eval_sources`): read once, in file order, each source by itself."""

import itertools
import logging
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from omnizoo.config.data_section import Source
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.flat_pack import FlatPack, flatten
from omnizoo.data.reader import Reader

log = logging.getLogger(__name__)


def held_out_config(config: Config) -> Config:
    """For a reader of `data.eval_sources`: in file order, in one stream."""
    data = config.data.model_copy(update={"sources": config.data.eval_sources, "lanes": 1, "shuffle": False})
    return config.model_copy(update={"data": data})


def held_out_parts(reader: Reader) -> dict[str, Reader]:
    """Of a reader of held-out data, one for each source by its short name: packs are of one source each, so that losses
    can be told apart. Each has its share of `train.eval_packs`. Of one source, and where answers of several rows are
    looked at together, all of it by an empty name."""
    config, specs = reader.config, reader.config.data.sources
    if len(specs) == 1 or config.mismatched_answers:
        return {"": reader}
    weight = sum(spec.weight for spec in specs)
    parts = {}
    for number, (name, spec) in enumerate(zip(short_names(specs), specs, strict=True)):
        packs = max(1, round(config.train.eval_packs * spec.weight / weight))
        data = config.data.model_copy(update={"sources": [spec]})
        train = config.train.model_copy(update={"eval_packs": packs})
        own = config.model_copy(update={"data": data, "train": train})
        renderer = copy(reader.renderer)
        renderer.shapes = [reader.renderer.shape(number)]
        parts[name] = replace(reader, config=own, sources=[reader.sources[number]], renderer=renderer)
    return parts


def short_names(specs: Sequence[Source]) -> list[str]:
    """What sources are called in the names of metrics: files without folder and suffix; the second of two alike has a
    number."""
    seen: dict[str, int] = {}
    names = []
    for spec in specs:
        name = re.sub(r"[^\w.-]", "_", spec.name.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0])
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def read_held_out(reader: Reader, rank: int, world: int) -> list[FlatPack]:
    """This rank's part of the first `train.eval_packs` packs of a reader of held-out data, read once."""
    data, lane = reader.config.data, reader.lane(0, epochs=1)
    packs, bad, read = [], [], 0
    for pack in itertools.islice(iter(lane.next_pack, None), reader.config.train.eval_packs):
        assert pack is not None
        if read % world == rank:
            flat, undecodable = flatten(read, pack, reader)
            packs.append(flat)
            bad += undecodable
        read += 1
    if rank == 0:
        bad = lane.bad_rows + bad
    if bad and data.on_bad_row == "error":
        raise UserError(f"data.eval_sources: {bad[0]} (data.on_bad_row: skip goes on without such rows)")
    if bad:
        log.warning("skipped %d rows of data.eval_sources; the first: %s", len(bad), bad[0])
    if not read:
        lost = lane.counters.dropped_overlong + lane.counters.few_targets
        why = f"; {lost} lost to data.pack_tokens ({data.pack_tokens}) or data.min_targets" if lost else ""
        raise UserError(f"data.eval_sources ({', '.join(s.name for s in data.sources)}): no usable row{why}")
    return packs
