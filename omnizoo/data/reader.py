"""Everything that turns rows into packs: sources, the renderer, the modules that measure and decode media."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from omnizoo.config.schema import Config
from omnizoo.data.formats import Shape
from omnizoo.data.lanes import Lane
from omnizoo.data.render import Renderer
from omnizoo.data.rows import BadRow, RowSource
from omnizoo.data.sources import open_source
from omnizoo.modalities.base import Encoder, Item, Modality
from omnizoo.models.media_model import Positions, Turns

LOOKED_AT = 8  # rows, to tell the format of a source


@dataclass(frozen=True)
class Reader:
    """Everything that turns rows into packs."""

    config: Config
    sources: Sequence[RowSource]
    renderer: Renderer
    modalities: Mapping[str, Modality]
    most_positions: int | None = None  # that the model was made for, if it says so

    def prepare(self, item: Item) -> list[Item]:
        """Decode an item; a long one may become several. In a bf16 run, floats for an encoder travel as it will get
        them, in half the bytes; what a decoder makes targets of keeps every digit."""
        module = item.port.module(self.modalities)
        inputs = module.prepare(item.media)
        if not isinstance(module, Encoder):
            return [replace(item, raw=None, inputs=inputs | item.notes, notes={})]
        if self.config.parallel.precision == "bf16":
            inputs = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in inputs.items()}
        parts = module.parts(item.size, inputs)
        return item.cut(parts) if len(parts) > 1 else [replace(item, raw=None, inputs=inputs)]

    def format_of(self, source: int) -> tuple[str, str]:
        """What the first good one of the first rows of a source is taken as, and why."""
        rows = self.sources[source]
        for number in range(min(LOOKED_AT, len(rows))):
            try:
                found = self.renderer.format_of(rows.read(number), source)
            except BadRow:
                continue
            if found[0]:
                return found
        return "", ""

    def lane(self, number: int, epochs: float | None = None, patience: int = 0, by_rows: bool = False) -> Lane:
        config = self.config
        some = (number, epochs, patience, by_rows, config.mismatched_answers, self.most_positions)
        return Lane(config.data, self.sources, self.renderer, config.train.seed, *some)


def build_reader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    modalities: Mapping[str, Modality] | None = None,
    positions: Positions | None = None,
    turns: Turns | None = None,
    reserved: Sequence[int] = (),
    most_positions: int | None = None,
    sources: Sequence[RowSource] | None = None,
) -> Reader:
    """What the model says about content other than text (`read_modalities`): `modalities`, `positions` and `turns`, and
    ids that are `reserved` for media which nobody feeds. `most_positions`: longer samples are counted. `sources` take
    the place of those of the config."""
    known = modalities or {}
    place = "data.eval_sources" if config.data.sources is config.data.eval_sources else "data.sources"
    if sources is None:
        some = (config.data.media_outside, known, config.data.cache_dir)
        keys = [f"{place}.{i}" for i in range(len(config.data.sources))]
        sources = [open_source(spec, *some, key) for spec, key in zip(config.data.sources, keys, strict=True)]
    data = config.data
    shapes = [Shape(f"{place}.{i}", spec.format, spec.json_columns) for i, spec in enumerate(data.sources)]
    how = (data.ignore, reserved, config.preference_pairs, config.single_answers, shapes, config.learns_answers)
    renderer = Renderer(tokenizer, data.append_eos, known, positions, config.train.seed, *how, turns=turns)
    return Reader(config, sources, renderer, known, most_positions)
