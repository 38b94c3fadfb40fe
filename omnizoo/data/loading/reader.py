"""The reader of a run: its sources, the renderer, and the modules that measure and decode media.

Together, they contain everything that is needed to convert rows to packs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.rendering.prompt_renderer import PromptRenderer, TextGeometry
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.rendering.thinking import Thinking
from omnizoo.data.row import BadRow, SourceSchema
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.open import open_source
from omnizoo.modalities.base import Encoder, Modality, find_module
from omnizoo.modalities.item import MediaItem
from omnizoo.modalities.precomputed import StoredTargets
from omnizoo.models.media.media_model import Positions, SpeakerFormat

FORMAT_ROWS = 8  # maximum number of rows to read until one shows the format of its source


@dataclass(frozen=True)
class Reader:
    """The sources of a run, and everything that converts their rows to packs."""

    config: Config
    sources: Sequence[RowSource]
    renderer: Renderer | PromptRenderer
    modalities: Mapping[str, Modality]
    most_positions: int | None = None  # maximum number of positions of the model; None if its config has none

    @property
    def text_renderer(self) -> Renderer:
        """The renderer of a language model. Raises a `UserError` for a diffusion transformer."""
        if isinstance(self.renderer, PromptRenderer):
            raise UserError("model: a diffusion transformer generates no text, which this needs. Use a language model.")
        return self.renderer

    def prepare(self, item: MediaItem) -> list[MediaItem]:
        """Decode the media of an item, and return the item with its inputs.

        The result has several items if the encoder splits a long item. In a bf16 run, floating-point inputs of encoders
        are converted to bf16, to halve the number of bytes to send. Inputs of decoders keep their precision, because
        targets are computed from them.

        Raises:
            BadMedia: If the media cannot be decoded.
        """
        module = find_module(self.modalities, item.port)
        stored = item.media.value
        inputs = stored.read() if isinstance(stored, StoredTargets) else module.prepare(item.media)
        if not isinstance(module, Encoder):
            return [replace(item, raw=None, inputs=inputs | item.notes, notes={})]
        if self.config.train.precision == "bf16":
            inputs = {name: _to_bf16(tensor) for name, tensor in inputs.items()}
        parts = module.split(item.size, inputs)
        return item.cut(parts) if len(parts) > 1 else [replace(item, raw=None, inputs=inputs)]

    def format_of(self, source: int) -> tuple[str, str]:
        """Return the format of the first usable row of a source, and the rule that determined it.

        Both are empty if none of the first `FORMAT_ROWS` rows is usable.
        """
        rows = self.sources[source]
        for number in range(min(FORMAT_ROWS, len(rows))):
            try:
                format_name, reason = self.renderer.format_of(rows.read(number), source)
            except BadRow:
                continue
            if format_name:
                return format_name, reason
        return "", ""


def _to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a floating-point tensor to bf16. Return other tensors unchanged."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def build_reader(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    modalities: Mapping[str, Modality] | None = None,
    positions: Positions | None = None,
    turns: SpeakerFormat | None = None,
    reserved: Sequence[int] = (),
    most_positions: int | None = None,
    sources: Sequence[RowSource] | None = None,
    prompts: TextGeometry | None = None,
) -> Reader:
    """Open the sources and build the renderer. `read_modalities` returns most of the optional arguments.

    Args:
        config: The config of the run.
        tokenizer: The tokenizer of the model.
        modalities: The modalities of the model, by name.
        positions: Function that returns the position ids of a sample; None if they are 0, 1, 2, ...
        turns: The format of turns, for speech models that have speakers instead of a chat template.
        reserved: Ids of placeholder tokens for media that this run does not provide. Rows must not contain them.
        most_positions: Maximum number of positions of the model; longer samples are counted. None if it is unknown.
        sources: Sources that are already open, to use instead of the sources in the config.
        prompts: Number of text tokens of prompts, for a diffusion transformer; None for a language model.

    Returns:
        The reader.

    Raises:
        UserError: If a source cannot be opened.
    """
    data = config.data
    modalities = modalities or {}
    section = "data.eval_sources" if data.sources is data.eval_sources else "data.sources"
    keys = [f"{section}.{i}" for i in range(len(data.sources))]
    if sources is None:
        sources = [
            open_source(spec, data.media_outside, modalities, data.cache_dir, key)
            for spec, key in zip(data.sources, keys, strict=True)
        ]
    schemas = [
        SourceSchema(key, spec.format, spec.json_columns, spec.untagged_media)
        for spec, key in zip(data.sources, keys, strict=True)
    ]
    if prompts is not None:
        prompt_renderer = PromptRenderer(
            modalities=modalities,
            geometry=prompts,
            pack_tokens=data.pack_tokens,
            text_dropout=data.text_dropout,
            seed=config.train.seed,
            ignore=data.ignore,
            schemas=schemas,
        )
        return Reader(config=config, sources=sources, renderer=prompt_renderer, modalities=modalities)
    renderer = Renderer(
        tokenizer,
        data.append_eos,
        modalities=modalities,
        positions=positions,
        seed=config.train.seed,
        ignore=data.ignore,
        reserved=reserved,
        preferences=config.preference_pairs,
        labeled_responses=config.single_answers,
        schemas=schemas,
        trains_decoders=config.learns_answers,
        turns=turns,
        thinking=Thinking.of(data),
        score_head=config.model.score_head,
    )
    return Reader(
        config=config,
        sources=sources,
        renderer=renderer,
        modalities=modalities,
        most_positions=most_positions,
    )
