"""Everything that converts rows to packs: sources, the renderer, and the modules that measure and decode media."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from omnizoo.config.schema import Config
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.rows.schemas import SourceSchema
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.modalities.base import Encoder, Modality, find_module
from omnizoo.modalities.item import MediaItem
from omnizoo.models.media.media_model import Positions, SpeakerFormat

LOOKED_AT = 8  # number of rows to infer the format of a source from


@dataclass(frozen=True)
class Reader:
    """The sources of a run, and everything that converts their rows to packs."""

    config: Config
    sources: Sequence[RowSource]
    renderer: Renderer
    modalities: Mapping[str, Modality]
    most_positions: int | None = None  # maximum number of positions of the model; None if its config has none

    def prepare(self, item: MediaItem) -> list[MediaItem]:
        """Decode an item. An encoder may split a long item into several.

        In a bf16 run, floating-point inputs of encoders are converted here, which halves the bytes to send. Inputs of
        decoders keep their precision, because targets are computed from them.
        """
        module = find_module(self.modalities, item.port)
        inputs = module.prepare(item.media)
        if not isinstance(module, Encoder):
            return [replace(item, raw=None, inputs=inputs | item.notes, notes={})]
        if self.config.train.precision == "bf16":
            inputs = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in inputs.items()}
        parts = module.split(item.size, inputs)
        return item.cut(parts) if len(parts) > 1 else [replace(item, raw=None, inputs=inputs)]

    def format_of(self, source: int) -> tuple[str, str]:
        """Return the format of the first usable row of a source, and the rule that decided it.

        Both are empty if none of the first `LOOKED_AT` rows is usable.
        """
        rows = self.sources[source]
        for number in range(min(LOOKED_AT, len(rows))):
            try:
                found = self.renderer.format_of(rows.read(number), source)
            except BadRow:
                continue
            if found[0]:
                return found
        return "", ""


def build_reader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    modalities: Mapping[str, Modality] | None = None,
    positions: Positions | None = None,
    turns: SpeakerFormat | None = None,
    reserved: Sequence[int] = (),
    most_positions: int | None = None,
    sources: Sequence[RowSource] | None = None,
) -> Reader:
    """Open the sources and build the renderer. `read_modalities` returns most of the optional arguments.

    Args:
        config: The config of the run.
        tokenizer: Tokenizer of the model.
        modalities: Encoders and decoders of each modality.
        positions: Returns the position ids of a sample; None for 0, 1, 2, ...
        turns: Format of turns, for models that have speakers instead of a chat template.
        reserved: Placeholder token ids of media that the model gets no inputs for. Rows must not contain them.
        most_positions: Maximum number of positions of the model. Longer samples are counted.
        sources: Opened sources to use instead of those of the config.

    Returns:
        The reader.

    Raises:
        UserError: If a source cannot be opened.
    """
    known = modalities or {}
    place = "data.eval_sources" if config.data.sources is config.data.eval_sources else "data.sources"
    if sources is None:
        some = (config.data.media_outside, known, config.data.cache_dir)
        keys = [f"{place}.{i}" for i in range(len(config.data.sources))]
        sources = [open_source(spec, *some, key) for spec, key in zip(config.data.sources, keys, strict=True)]
    data = config.data
    shapes = [SourceSchema(f"{place}.{i}", spec.format, spec.json_columns) for i, spec in enumerate(data.sources)]
    how = (data.ignore, reserved, config.preference_pairs, config.single_answers, shapes, config.learns_answers)
    renderer = Renderer(tokenizer, data.append_eos, known, positions, config.train.seed, *how, turns=turns)
    return Reader(config, sources, renderer, known, most_positions)
