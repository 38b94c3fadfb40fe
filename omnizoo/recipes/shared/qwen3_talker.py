"""Talker of Qwen3-Omni.

Its context consists of the user's turns: text as the thinker's embeddings, and media as hidden states of a middle layer
of the thinker. The text of the response follows, one token per frame of speech. The talker predicts the first codebook,
and its code predictor predicts the remaining codebooks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.flop_count import FlopCounter, causal_pairs, is_trained
from omnizoo.modalities.item import Ids, Inputs, MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.recipes.shared.qwen_talker import OPTIONS, Talker, packed
from omnizoo.recipes.shared.talker_inputs import BOS, HEADER, PAD, TalkerContext, TurnTokens

RESERVED = 1024  # ids at the end of the talker's vocabulary that are not codes
PREFIX = 6  # positions between the header of the response and the first frame


class Qwen3Talker(Talker):
    """Talker of Qwen3-Omni.

    Args:
        residual_weight: Weight of the loss on all codebooks except the first, relative to the loss on the first.
    """

    prefix = (PAD, PAD, PAD, PAD, BOS)

    def __init__(
        self,
        model: PreTrainedModel,
        speaker: str | None = None,
        codec: str | None = None,
        residual_weight: float = 1.0,
        max_frames: int = 8192,
    ) -> None:
        super().__init__(model, speaker, codec, max_frames)
        if not isinstance(residual_weight, int | float) or not 0 <= residual_weight < math.inf:
            raise UserError(
                f"{OPTIONS}.residual_weight: {residual_weight!r} is not valid; expected a finite number, at least 0"
            )
        self.term_weights = {"": 1.0, "residual": residual_weight}
        settings = self.settings
        codec_size = self.config.code2wav_config.codebook_size
        first_size = min(settings.text_config.vocab_size - RESERVED, codec_size)
        later_size = min(settings.code_predictor_config.vocab_size, codec_size)
        sizes = [first_size] + [later_size] * (settings.num_code_groups - 1)
        self.set_up(settings.speaker_id or {}, sizes, self.talker.model, self.talker.code_predictor.model)
        self.turns = TurnTokens(
            start=self.config.im_start_token_id,
            end=self.config.im_end_token_id,
            user=self.config.user_token_id,
            assistant=self.config.assistant_token_id,
        )
        self.end_id = settings.codec_eos_token_id
        self.depth = settings.accept_hidden_layer

    def spans_before(self, turns: list[tuple[int, int, int]], start: int) -> list[tuple[int, int]]:
        """Return the user's turns."""
        return [(first, end - first) for first, end, role in turns if role == self.turns.user and first < start]

    def check_item(self, item: MediaItem, what: str) -> None:
        if item.size.inside:
            raise BadMedia(
                f"{what}: the talker does not support {item.media.name}, a video with its audio. "
                "Remove the audio (use_audio_in_video: false) or the speech."
            )

    def notes(self, context: TalkerContext, frames: int) -> Inputs:
        """Return the indices of media rows and of text rows, in addition to the notes of the base class."""
        is_media = np.isin(context.before, self.media_ids)
        response = np.arange(len(context.before), context.rows)
        text = np.append(np.flatnonzero(~is_media), response)
        media = torch.from_numpy(np.flatnonzero(is_media))
        return super().notes(context, frames) | {"text": torch.from_numpy(text), "media": media}

    @property
    def position_model(self) -> Any:
        """An object with the attributes of the talker that `get_rope_index` reads, including an `audio_config`.

        `get_rope_index` reads `audio_config` if there are images and audio, but published configs lack it (transformers
        5.22.2).
        """
        config = copy(self.settings)
        config.audio_config = self.config.thinker_config.audio_config
        # Not a copy of the module, because modules that FSDP has wrapped cannot be copied.
        talker = SimpleNamespace(
            config=config,
            spatial_merge_size=config.spatial_merge_size,
            get_llm_pos_ids_for_vision=self.talker.get_llm_pos_ids_for_vision,
        )
        talker.get_rope_index = partial(type(self.talker).get_rope_index, talker)
        return talker

    def rows(self, inputs: Inputs) -> int:
        return len(inputs["text"]) + len(inputs["media"])

    def rows_from(self, states: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embeddings, hidden = (state.flatten(0, -2) for state in states)
        return torch.where(self.is_media(ids)[:, None], hidden, embeddings)

    def text_inputs(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        talker = self.talker
        first_rows = np.cumsum([0, *(self.rows(item) for item in items)]).tolist()
        text = torch.cat([item["text"] + first for item, first in zip(items, first_rows, strict=False)])
        media = torch.cat([item["media"] + first for item, first in zip(items, first_rows, strict=False)])

        # Rows of a table: the special embeddings, then the text rows, then the media rows.
        config = self.config
        special_ids = [config.tts_pad_token_id, config.tts_bos_token_id, config.tts_eos_token_id]
        special = self.model.thinker.get_input_embeddings()(self.constants(special_ids, rows.device)).to(rows.dtype)
        table = torch.cat(
            [
                talker.text_projection(special),
                talker.text_projection(rows.index_select(0, text)),
                talker.hidden_projection(rows.index_select(0, media)),
            ]
        )
        row_order = torch.cat([text, media])
        table_index = torch.empty_like(row_order)  # index of each row in the table
        table_index[row_order] = torch.arange(len(special_ids), len(table), device=rows.device)

        sources = []
        for item, first in zip(items, first_rows, strict=False):
            source = item["source"]
            row = table_index[source.clamp(min=0) + first]
            sources.append(torch.where(source < 0, -1 - source, row))
        return table.index_select(0, torch.cat(sources))

    def marks(self, item: Inputs) -> torch.Tensor:
        names = ("codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id", "codec_pad_id", "codec_bos_id")
        fixed = self.constants([getattr(self.settings, name) for name in names], item["voice"].device)
        return torch.cat([fixed[:3], item["voice"], fixed[3:]])

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        later = self.talker.code_predictor.get_input_embeddings()
        embedded = [self.talker.get_input_embeddings()(codes[:, 0])]
        for codebook, table in enumerate(later, start=1):
            embedded.append(table(codes[:, codebook]))
        return torch.stack(embedded, 1)

    def further_losses(
        self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss of the code predictor on each frame.

        Each frame is one sequence. It consists of the hidden state that predicts the frame, and the codes of the frame.
        Each position predicts the code of the next codebook.
        """
        predictor = self.talker.code_predictor
        frames, codebooks = codes.shape
        inputs = torch.cat([hidden[:, None], spoken[:, :-1].to(hidden.dtype)], 1)
        end = frames * codebooks + 1
        frame_starts = torch.arange(0, end, codebooks, device=codes.device, dtype=torch.int32)
        out = predictor.model(
            inputs_embeds=inputs.flatten(0, 1)[None],
            position_ids=torch.arange(codebooks, device=codes.device).repeat(frames)[None],
            **packed(frame_starts, codebooks),
        ).last_hidden_state
        hidden_by_codebook = out.view(frames, codebooks, -1)
        losses = []
        for codebook, head in enumerate(predictor.lm_head, start=1):
            losses.append(code_loss(head(hidden_by_codebook[:, codebook]), codes[:, codebook]))
        return {"residual": torch.stack(losses).sum(0)}

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        talker = self.talker
        predictor = talker.code_predictor
        codebooks = len(self.sizes)
        row = FlopCounter(is_trained(self.model.thinker))
        row.run(talker.text_projection, 1)
        position = FlopCounter(row.trained)
        pair = self.count_layers(position)
        frame = FlopCounter(position.trained)
        frame.run(talker.codec_head, 1)
        frame.run(predictor.model.layers, codebooks)
        width = predictor.config.num_attention_heads * predictor.config.head_dim
        frame.attend(len(predictor.model.layers) * causal_pairs(codebooks), width)
        frame.run(predictor.lm_head, 1)
        return row.flops, position.flops, pair.flops, frame.flops

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence[MediaItem], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        device = states.device
        context, notes = self.generation_inputs(ids, items, options, device)
        begin = len(context.before) + PREFIX
        rows = torch.cat([states[first : first + count] for first, count in context.spans])
        text = self.text_inputs(rows, [notes])
        embeddings = self.with_marks(text[:begin], [notes], [begin])[None]

        vocabulary = self.settings.text_config.vocab_size
        reserved = range(vocabulary - RESERVED, vocabulary)
        padding = np.full(HEADER + PREFIX, self.config.tts_pad_token_id)
        input_ids = np.append(context.before[:-HEADER], padding)
        with self.audio_config_set():
            result = self.generate_codes(
                context,
                options,
                sampling,
                inputs_embeds=embeddings,
                attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.int64, device=device),
                talker_input_ids=torch.from_numpy(input_ids).long()[None].to(device),
                trailing_text_hidden=text[None, begin:-1],
                tts_pad_embed=text[None, -1:],
                eos_token_id=self.end_id,
                suppress_tokens=[id for id in reserved if id != self.end_id],
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        frames = [step[-1] for step in result.hidden_states if step[-1] is not None]
        no_frames = torch.empty(0, len(self.sizes), dtype=torch.int64, device=device)
        return torch.cat([no_frames, *frames])

    @contextmanager
    def audio_config_set(self) -> Iterator[None]:
        """Context manager that sets the `audio_config` that published configs lack (see `position_model`)."""
        is_set = hasattr(self.settings, "audio_config")
        if not is_set:
            self.settings.audio_config = self.config.thinker_config.audio_config
        try:
            yield
        finally:
            if not is_set:
                del self.settings.audio_config

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Return audio samples at `RATE`."""
        if not len(targets):
            return np.zeros(0, np.float32)
        wave = self.model.code2wav.chunked_decode(targets.T[None], chunk_size=300, left_context_size=25)
        return wave[0, 0].float().cpu().numpy()
