"""The talker of Qwen3-Omni. Of the user's turns it hears text as the thinker's embeddings and media as hidden states
from the middle of the thinker; then the answer's text, a token with each frame of speech. Its code predictor learns all
codebooks but the first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Ids, Inputs, Item, Sampling
from omnizoo.modalities.item import BadMedia
from omnizoo.modalities.tally import Tally, causal_pairs, is_trained
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.recipes.qwen_hearing import BOS, EOS, HEADER, PAD, Heard, Turns
from omnizoo.recipes.qwen_talker import MOST_FRAMES, OPTIONS, REPETITION_PENALTY, Talker, drawn_by, packed, seeded
from omnizoo.recipes.qwen_towers import shapes_of

RESERVED = 1024  # ids at the end of the talker's vocabulary that are no codes
PREFIX = 6  # places between the answer's header and the first frame


class Qwen3Talker(Talker):
    """`residual_weight`: of the loss on all codebooks but the first, against that on the first."""

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
            raise UserError(f"{OPTIONS}.residual_weight: {residual_weight!r}; expected a number, at least 0")
        self.terms = {"": 1.0, "residual": residual_weight}
        config, settings = self.config, self.settings
        first = min(settings.text_config.vocab_size - RESERVED, config.code2wav_config.codebook_size)
        later = min(settings.code_predictor_config.vocab_size, config.code2wav_config.codebook_size)
        sizes = [first] + [later] * (settings.num_code_groups - 1)
        self.set_up(settings.speaker_id or {}, sizes, self.talker.model, self.talker.code_predictor.model)
        names = ("im_start", "im_end", "user", "assistant")
        self.turns = Turns(*(getattr(config, f"{name}_token_id") for name in names))

    @property
    def end_id(self) -> int:
        return int(self.settings.codec_eos_token_id)

    @property
    def depth(self) -> int:
        return int(self.settings.accept_hidden_layer)

    def heard(
        self, ids: Ids, items: Sequence[Item], turns: list[tuple[int, int, int]], start: int, stop: int, what: str
    ) -> Heard:
        """The user's turns before the answer, and its own header."""
        asked = [(first, end - first) for first, end, role in turns if role == self.turns.user and first < start]
        if not asked:
            raise BadMedia(f"{what} is an answer to nothing: no message of the user is before it")
        within = [
            item
            for item in items
            if item.spans and any(first <= item.spans[0][0] < first + count for first, count in asked)
        ]
        if sounding := next((item for item in within if item.size.inside), None):
            raise BadMedia(
                f"{what} answers {sounding.media.name}, a clip with its own sound, which the model's talker does not "
                "hear so; leave the sound or the speech out"
            )
        before = np.concatenate([*(ids[first : first + count] for first, count in asked), ids[start : start + HEADER]])
        return Heard([*asked, (start, stop - start)], before, within, stop - start - HEADER)

    def prefix(self, text: int) -> list[int]:
        return [PAD, PAD, PAD, PAD, BOS, text]

    def notes(self, heard: Heard, frames: int) -> Inputs:
        """Also which rows are media, and which are text."""
        is_media = np.isin(heard.before, self.media_ids)
        text = np.append(np.flatnonzero(~is_media), np.arange(len(heard.before), heard.rows))
        media = torch.from_numpy(np.flatnonzero(is_media))
        return super().notes(heard, frames) | {"text": torch.from_numpy(text), "media": media}

    def positions(self, heard: Heard, more: int) -> torch.Tensor:
        """As the talker itself counts, by the media in what it hears."""
        asked = heard.before[:-HEADER]
        ids = torch.from_numpy(np.append(asked, np.full(HEADER + more, self.config.tts_pad_token_id))).long()[None]
        if not heard.items:
            return torch.arange(ids.shape[1]).expand(3, -1)
        about = self.media_shapes(heard.items)
        axes, _ = type(self.talker).get_rope_index(
            self.counting,
            ids,
            image_grid_thw=about["image_grid_thw"],
            video_grid_thw=about["video_grid_thw"],
            attention_mask=torch.ones_like(ids),
            audio_seqlens=about["audio_feature_lengths"],
            second_per_grids=about["video_second_per_grid"],
        )
        positions: torch.Tensor = axes[:, 0]
        return positions

    @property
    def counting(self) -> Any:
        """What the talker's own function for positions reads of it, and how long sound is: it asks its config for that
        where there are pictures besides, and published ones do not say it (transformers 5.22.2)."""
        asked = ("image", "video", "audio", "vision_start", "audio_start")
        ids = {f"{name}_token_id": getattr(self.settings, f"{name}_token_id") for name in asked}
        seconds = self.settings.position_id_per_seconds
        config = SimpleNamespace(
            **ids, position_id_per_seconds=seconds, audio_config=self.config.thinker_config.audio_config
        )
        return SimpleNamespace(
            config=config,
            spatial_merge_size=self.settings.spatial_merge_size,
            get_llm_pos_ids_for_vision=self.talker.get_llm_pos_ids_for_vision,
        )

    def media_shapes(self, items: Sequence[Item]) -> dict[str, torch.Tensor | None]:
        """By the names of the talker's own arguments."""
        sounds, clips = shapes_of(items, "audio"), shapes_of(items, "video")
        return {
            "image_grid_thw": shapes_of(items, "image"),
            "video_grid_thw": None if clips is None else clips[:, :3].long(),
            "audio_feature_lengths": None if sounds is None else sounds[:, 0],
            "video_second_per_grid": None if clips is None else clips[:, 3],
        }

    def blank(self) -> Inputs:
        count = HEADER + PREFIX + 1
        return {
            "codes": torch.zeros(1, len(self.sizes), dtype=torch.int64),
            "voice": torch.zeros(1, dtype=torch.int64),
            "source": torch.tensor([*range(HEADER), *self.prefix(HEADER), EOS]),
            "positions": torch.arange(count).expand(3, -1).double().contiguous().view(torch.int64),
            "text": torch.arange(HEADER + 1),
            "media": torch.empty(0, dtype=torch.int64),
        }

    def rows(self, inputs: Inputs) -> int:
        return len(inputs["text"]) + len(inputs["media"])

    def read(self, kept: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embeddings, hidden = (states.flatten(0, -2) for states in kept)
        return torch.where(self.is_media(ids)[:, None], hidden, embeddings)

    def told(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        talker, device = self.talker, rows.device
        firsts = np.cumsum([0, *(self.rows(item) for item in items)]).tolist()
        text, media = (
            torch.cat([item[name] + first for item, first in zip(items, firsts, strict=False)])
            for name in ("text", "media")
        )
        meaning = self.constants(
            [getattr(self.config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")], device
        )
        special = self.model.thinker.get_input_embeddings()(meaning).to(rows.dtype)
        seen = [talker.text_projection(special), talker.text_projection(rows.index_select(0, text))]
        table = torch.cat([*seen, talker.hidden_projection(rows.index_select(0, media))])
        number = torch.cat([text, media])
        place = torch.empty_like(number)  # of each row in the table
        place[number] = torch.arange(len(meaning), len(table), device=device)
        sources = []
        for item, first in zip(items, firsts, strict=False):
            source = item["source"]
            sources.append(torch.where(source < 0, -1 - source, place[source.clamp(min=0) + first]))
        return table.index_select(0, torch.cat(sources))

    def marks(self, item: Inputs) -> torch.Tensor:
        names = ("codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id", "codec_pad_id", "codec_bos_id")
        fixed = self.constants([getattr(self.settings, name) for name in names], item["voice"].device)
        return torch.cat([fixed[:3], item["voice"], fixed[3:]])

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        later = self.talker.code_predictor.get_input_embeddings()
        first = self.talker.get_input_embeddings()(codes[:, 0])
        return torch.stack([first, *(table(codes[:, i + 1]) for i, table in enumerate(later))], 1)

    def further_losses(
        self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Each frame is a sequence: what predicts it, then its codes; each place predicts the next codebook's."""
        predictor, (frames, books) = self.talker.code_predictor, codes.shape
        inputs = torch.cat([hidden[:, None], spoken[:, :-1].to(hidden.dtype)], 1)
        out = predictor.model(
            inputs_embeds=inputs.flatten(0, 1)[None],
            position_ids=torch.arange(books, device=codes.device).repeat(frames)[None],
            **packed(torch.arange(0, frames * books + 1, books, device=codes.device, dtype=torch.int32), books),
        ).last_hidden_state.view(frames, books, -1)
        losses = [cross_entropy_sum(head(out[:, i + 1]), codes[:, i + 1]) for i, head in enumerate(predictor.lm_head)]
        return {"residual": torch.stack(losses).sum()}

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        talker, predictor, books = self.talker, self.talker.code_predictor, len(self.sizes)
        row = Tally(is_trained(self.model.thinker))
        row.run(talker.text_projection, 1)
        place = Tally(row.trained)
        pair = self.tally_layers(place)
        frame = Tally(place.trained)
        frame.run(talker.codec_head, 1)
        frame.run(predictor.model.layers, books)
        small = predictor.config
        frame.attend(len(predictor.model.layers) * causal_pairs(books), small.num_attention_heads * small.head_dim)
        frame.run(predictor.lm_head, 1)
        return row.flops, place.flops, pair.flops, frame.flops

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence[Item], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        device = states.device
        heard, notes = self.asked(ids, items, options, device)
        begin = len(heard.before) + PREFIX
        rows = torch.cat([states[first : first + count] for first, count in heard.spans])
        told = self.told(rows, [notes])
        embeddings = self.with_marks(told[:begin], [notes], [begin])[None]
        vocabulary = self.settings.text_config.vocab_size
        reserved = range(vocabulary - RESERVED, vocabulary)
        seen = np.append(heard.before[:-HEADER], np.full(HEADER + PREFIX, self.config.tts_pad_token_id))
        about = {name: value for name, value in self.media_shapes(heard.items).items() if value is not None}
        with seeded(sampling), self.sound_told():
            result = self.talker.generate(
                inputs_embeds=embeddings,
                attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.int64, device=device),
                talker_input_ids=torch.from_numpy(seen).long()[None].to(device),
                trailing_text_hidden=told[None, begin:-1],
                tts_pad_embed=told[None, -1:],
                max_new_tokens=options.get("max_frames") or MOST_FRAMES,
                eos_token_id=self.end_id,
                suppress_tokens=[id for id in reserved if id != self.end_id],
                repetition_penalty=REPETITION_PENALTY,
                output_hidden_states=True,
                return_dict_in_generate=True,
                **about,
                **drawn_by(sampling),
            )
        frames = [step[-1] for step in result.hidden_states if step[-1] is not None]
        none = torch.empty(0, len(self.sizes), dtype=torch.int64, device=device)
        return torch.cat([none, *frames])

    @contextmanager
    def sound_told(self) -> Iterator[None]:
        """See `counting`."""
        is_told = hasattr(self.settings, "audio_config")
        if not is_told:
            self.settings.audio_config = self.config.thinker_config.audio_config
        try:
            yield
        finally:
            if not is_told:
                del self.settings.audio_config

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Samples at `RATE`."""
        if not len(targets):
            return np.zeros(0, np.float32)
        wave = self.model.code2wav.chunked_decode(targets.T[None], chunk_size=300, left_context_size=25)
        return wave[0, 0].float().cpu().numpy()
