"""The talker of Qwen2.5-Omni: one codebook. It hears the whole conversation before the answer, each token as the
thinker's embedding (of media: nothing) and its last hidden state together; then the answer's text, a token with each
frame.

It is wired as the model's own `generate` wires a prompt that is padded on the left. Of one that is not padded,
transformers 5.22.2 takes the mask away on its way to the talker, which then adds neither mark of the codec before the
first frame and counts the places of media like those of text: that is not how the published weights were trained.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.modalities.base import Ids, Inputs, Item, Sampling
from omnizoo.modalities.item import BadMedia
from omnizoo.modalities.spoken import VOICES, Voice, read_voices
from omnizoo.modalities.tally import Tally, is_trained
from omnizoo.models.published_files import also_carry, carried
from omnizoo.recipes.qwen_hearing import BOS, EOS, HEADER, Heard, Turns
from omnizoo.recipes.qwen_sound import thinker_positions
from omnizoo.recipes.qwen_talker import MOST_FRAMES, OPTIONS, REPETITION_PENALTY, Talker, drawn_by, seeded
from omnizoo.recipes.qwen_towers import shapes_of

PREFIX = 2  # places between the answer's header and the first frame


class Qwen25Talker(Talker):
    """`speakers`: the file with the model's voices, where its folder has none (`spk_dict.safetensors`)."""

    no_speakers = (
        f": the model comes without {VOICES}; docs/talker.md says how to make it, or name it as options.speakers"
    )

    def __init__(
        self,
        model: PreTrainedModel,
        speaker: str | None = None,
        speakers: str | None = None,
        codec: str | None = None,
        max_frames: int = 8192,
    ) -> None:
        super().__init__(model, speaker, codec, max_frames)
        self._speakers(speakers)
        settings, codec_config = self.settings, self.config.token2wav_config.dit_config
        special = [getattr(settings, f"tts_codec_{name}_token_id") for name in ("start", "end", "pad", "mask")]
        size = min(*special, codec_config.num_embeds)
        self.set_up({name: voice.token for name, voice in self.known.items()}, [size], self.talker.model)
        self.turns = Turns(None, None, None, None)

    def _speakers(self, file: str | None) -> None:
        key = f"{OPTIONS}.speakers: {file}" if file else VOICES
        if file is not None:
            also_carry(self.model, VOICES, file, f"{OPTIONS}.speakers")  # so that exports have it
        content, codec = carried(self.model).files.get(VOICES), self.config.token2wav_config.dit_config
        sizes = {"cond": codec.enc_emb_dim, "ref_mel": codec.mel_dim}
        self.known: dict[str, Voice] = {} if content is None else read_voices(content, sizes, key)

    def voice(self, given: Any, what: str) -> str:
        name, vocabulary = super().voice(given, what), self.config.thinker_config.text_config.vocab_size
        if self.speakers[name] >= vocabulary:  # asked here, since small copies of the model keep the file
            raise BadMedia(
                f"{what} has the speaker {name!r}, whose bos_token in {VOICES} is {self.speakers[name]}, and the "
                f"vocabulary ends at {vocabulary - 1}: the file is of another model"
            )
        return name

    def read_with(self, tokenizer: Any) -> None:
        names = ("<|im_start|>", "<|im_end|>", "user", "assistant")
        known = tokenizer.get_vocab()
        self.turns = Turns(*(known.get(name) for name in names))

    @property
    def end_id(self) -> int:
        return int(self.settings.tts_codec_end_token_id)

    @property
    def depth(self) -> None:
        return None

    def heard(
        self, ids: Ids, items: Sequence[Item], turns: list[tuple[int, int, int]], start: int, stop: int, what: str
    ) -> Heard:
        within = [item for item in items if item.spans and item.spans[0][0] < start]
        return Heard([(0, stop)], ids[: start + HEADER], within, stop - start - HEADER)

    def prefix(self, text: int) -> list[int]:
        return [BOS, text]

    def positions(self, heard: Heard, more: int) -> torch.Tensor:
        """As the talker itself counts, which is as the thinker does."""
        ids = np.append(heard.before, np.full(more, self.settings.tts_text_pad_token_id)).astype(np.int32)
        return torch.from_numpy(thinker_positions(self.talker, ids, heard.items))[1:]

    def blank(self) -> Inputs:
        return {
            "codes": torch.zeros(1, 1, dtype=torch.int64),
            "voice": torch.zeros(1, dtype=torch.int64),
            "source": torch.tensor([0, *self.prefix(1), EOS]),
            "positions": torch.arange(1 + PREFIX + 1).expand(3, -1).double().contiguous().view(torch.int64),
            "row": torch.arange(2),
        }

    def notes(self, heard: Heard, frames: int) -> Inputs:
        return super().notes(heard, frames) | {"row": torch.arange(heard.rows)}

    def rows(self, inputs: Inputs) -> int:
        return len(inputs["row"])

    def read(self, kept: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embeddings, hidden = (states.flatten(0, -2) for states in kept)
        return hidden + embeddings.masked_fill(self.is_media(ids)[:, None], 0)

    def told(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        settings, device = self.settings, rows.device
        pad, end = self.constants([settings.tts_text_pad_token_id, settings.tts_text_end_token_id], device).split(1)
        meaning = torch.cat([part for item in items for part in (pad, item["voice"], end)])
        special = self.model.thinker.get_input_embeddings()(meaning).to(rows.dtype)
        each, sources, first = 3, [], len(meaning)
        for number, item in enumerate(items):
            source = item["source"]
            sources.append(torch.where(source < 0, each * number - 1 - source, source + first))
            first += self.rows(item)
        return torch.cat([special, rows]).index_select(0, torch.cat(sources))

    def marks(self, item: Inputs) -> torch.Tensor:
        ids = [self.settings.tts_codec_pad_token_id, self.settings.tts_codec_start_token_id]
        return self.constants(ids, item["voice"].device)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.talker.get_input_embeddings()(codes)
        return embeddings

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.talker.thinker_to_talker_proj(embeddings)
        return projected

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        place = Tally(is_trained(self.model.thinker))
        place.run(self.talker.thinker_to_talker_proj, 1)
        pair = self.tally_layers(place)
        frame = Tally(place.trained)
        frame.run(self.talker.codec_head, 1)
        return 0.0, place.flops, pair.flops, frame.flops

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence[Item], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        device, settings = states.device, self.settings
        heard, notes = self.asked(ids, items, options, device)
        told = self.told(states[: heard.rows], [notes])
        begin = len(heard.before) + PREFIX
        # One place of padding on the left, so that its mask reaches the talker, which then adds the marks: see above.
        embeddings = torch.cat([told.new_zeros(1, told.shape[1]), told[:begin]])[None]
        mask = torch.ones(1, 1 + begin, dtype=torch.int64, device=device)
        mask[0, 0] = 0
        marks = [settings.tts_codec_pad_token_id, settings.tts_codec_start_token_id]
        codec_ids = [settings.tts_codec_mask_token_id] * (1 + len(heard.before)) + marks
        text_ids = [
            settings.tts_text_pad_token_id,
            *heard.before.tolist(),
            int(notes["voice"]),
            int(ids[begin - PREFIX]),
        ]
        ending = [settings.tts_codec_pad_token_id, self.end_id]  # the model's own `generate` ends at either
        no_codes = range(self.sizes[0], settings.vocab_size)
        with seeded(sampling):
            result = self.talker.generate(
                input_ids=torch.tensor([codec_ids], device=device),
                input_text_ids=torch.tensor([text_ids], device=device),
                inputs_embeds=embeddings,
                attention_mask=mask,
                thinker_reply_part=told[None, begin:],
                max_new_tokens=options.get("max_frames") or MOST_FRAMES,
                eos_token_id=ending,
                pad_token_id=settings.tts_codec_pad_token_id,
                suppress_tokens=[id for id in no_codes if id not in ending],
                repetition_penalty=REPETITION_PENALTY,
                **self.media_shapes(heard.items, device),
                **drawn_by(sampling),
            )
        codes: torch.Tensor = result[0, len(codec_ids) :]
        is_code = ~torch.isin(codes, torch.tensor(ending, device=device))
        return codes[is_code.cumprod(0).bool()][:, None]

    def media_shapes(self, items: Sequence[Item], device: torch.device) -> dict[str, Any]:
        """By the names of the talker's own arguments."""
        sounds, clips = shapes_of(items, "audio"), shapes_of(items, "video")
        shapes = {
            "image_grid_thw": shapes_of(items, "image"),
            "video_grid_thw": None if clips is None else clips[:, :3].long(),
            "audio_feature_lengths": None if sounds is None else sounds[:, 0],
            "video_second_per_grid": None if clips is None else clips[:, 3],
        }
        told: dict[str, Any] = {name: value.to(device) for name, value in shapes.items() if value is not None}
        return told | {"use_audio_in_video": any(item.size.inside for item in items)}

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Samples at `RATE`. The codec begins with noise, always the same, so that the same codes sound the same."""
        if not len(targets):
            return np.zeros(0, np.float32)
        voice = self.known[self.voice(options.get("speaker"), "--speaker: the answer")]
        codec, device = self.model.token2wav.float(), targets.device  # as the model's own `generate` runs it
        with torch.random.fork_rng():
            torch.manual_seed(0)
            wave = codec(
                targets[:, 0][None],
                conditioning=voice.conditioning.to(device),
                reference_mel=voice.reference.to(device),
            )
        samples: torch.Tensor = wave
        return samples.reshape(-1).float().cpu().numpy()
