"""Talker of Qwen2.5-Omni, which has one codebook.

Its context is the whole conversation before the response. For each text token, the talker receives the sum of the
thinker's last hidden state and embedding. For each media token, it receives only the hidden state. The text of the
response follows, one token per frame.

Inputs are built as the model's own `generate` builds them for a prompt that is padded on the left. For a prompt without
padding, transformers 5.22.2 drops the mask before it calls the talker. The talker then adds no codec marks before the
first frame and counts media positions like text positions. The published weights were trained differently.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from omnizoo.modalities.decoders.precomputed_speech import VOICES, Voice, read_voices
from omnizoo.modalities.flop_count import FlopCounter, is_trained
from omnizoo.modalities.item import Ids, Inputs, MediaItem
from omnizoo.modalities.media import BadMedia
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.export_files import also_carry, carried
from omnizoo.recipes.shared.qwen_talker import OPTIONS, Talker
from omnizoo.recipes.shared.talker_inputs import BOS, TalkerContext, TurnTokens

PREFIX = 2  # positions between the header of the response and the first frame


class Qwen25Talker(Talker):
    """Talker of Qwen2.5-Omni.

    Args:
        speakers: File with the model's voices, if its folder has no `spk_dict.safetensors`.
    """

    prefix = (BOS,)
    no_speakers = (
        f"The model folder has no {VOICES}. Create it (docs/how-to/speech.md), or set options.speakers to such a file."
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
        self._read_voices(speakers)
        settings = self.settings
        codec_config = self.config.token2wav_config.dit_config
        special = [getattr(settings, f"tts_codec_{name}_token_id") for name in ("start", "end", "pad", "mask")]
        size = min(*special, codec_config.num_embeds)
        self.set_up({name: voice.token for name, voice in self.voices_by_name.items()}, [size], self.talker.model)
        self.turns = TurnTokens(start=None, end=None, user=None, assistant=None)  # set by `read_with`
        self.end_id = settings.tts_codec_end_token_id

    def _read_voices(self, file: str | None) -> None:
        """Read the voices from the model's folder, or from `file`."""
        key = f"{OPTIONS}.speakers: {file}" if file else VOICES
        if file is not None:
            also_carry(self.model, VOICES, file, f"{OPTIONS}.speakers")  # so that exports contain the file
        content = carried(self.model).files.get(VOICES)
        codec = self.config.token2wav_config.dit_config
        sizes = {"cond": codec.enc_emb_dim, "ref_mel": codec.mel_dim}
        self.voices_by_name: dict[str, Voice] = {} if content is None else read_voices(content, sizes, key)

    def voice(self, speaker: Any, what: str) -> str:
        name = super().voice(speaker, what)
        token = self.speakers[name]
        vocabulary = self.config.thinker_config.text_config.vocab_size
        if token >= vocabulary:  # checked here, because small copies of the model keep the file
            raise BadMedia(
                f"{what}: bos_token of the speaker {name!r} in {VOICES} is {token}, but the largest token id is "
                f"{vocabulary - 1}. Use the file of this model."
            )
        return name

    def read_with(self, tokenizer: Any) -> None:
        names = ("<|im_start|>", "<|im_end|>", "user", "assistant")
        vocabulary = tokenizer.get_vocab()
        start, end, user, assistant = (vocabulary.get(name) for name in names)
        self.turns = TurnTokens(start=start, end=end, user=user, assistant=assistant)

    def spans_before(self, turns: list[tuple[int, int, int]], start: int) -> list[tuple[int, int]]:
        """Return one span: the whole conversation before the response."""
        return [(0, start)]

    @property
    def position_model(self) -> Any:
        return self.talker

    def notes(self, context: TalkerContext, frames: int) -> Inputs:
        return super().notes(context, frames) | {"row": torch.arange(context.rows)}

    def rows(self, inputs: Inputs) -> int:
        return len(inputs["row"])

    def rows_from(self, states: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embeddings, hidden = (state.flatten(0, -2) for state in states)
        return hidden + embeddings.masked_fill(self.is_media(ids)[:, None], 0)

    def text_inputs(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        special_ids = [self.settings.tts_text_pad_token_id, self.settings.tts_text_end_token_id]
        pad, end = self.constants(special_ids, rows.device).split(1)
        special_by_item = [torch.cat([pad, item["voice"], end]) for item in items]
        special_ids_of_items = torch.cat(special_by_item)
        special = self.model.thinker.get_input_embeddings()(special_ids_of_items).to(rows.dtype)

        # Rows of a table: the special embeddings of all items, then the thinker rows of all items.
        sources = []
        first_special = 0
        first_row = len(special)
        for item, item_special in zip(items, special_by_item, strict=True):
            source = item["source"]
            sources.append(torch.where(source < 0, first_special - 1 - source, source + first_row))
            first_special += len(item_special)
            first_row += self.rows(item)
        return torch.cat([special, rows]).index_select(0, torch.cat(sources))

    def marks(self, item: Inputs) -> torch.Tensor:
        ids = [self.settings.tts_codec_pad_token_id, self.settings.tts_codec_start_token_id]
        return self.constants(ids, item["voice"].device)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.talker.get_input_embeddings()(codes)
        return embeddings

    def layer_inputs(self, embeddings: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.talker.thinker_to_talker_proj(embeddings)
        return projected

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        position = FlopCounter(is_trained(self.model.thinker))
        position.run(self.talker.thinker_to_talker_proj, 1)
        pair = self.count_layers(position)
        frame = FlopCounter(position.trained)
        frame.run(self.talker.codec_head, 1)
        return 0.0, position.flops, pair.flops, frame.flops

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence[MediaItem], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        device = states.device
        settings = self.settings
        context, notes = self.generation_inputs(ids, items, options, device)
        text = self.text_inputs(states[: context.rows], [notes])
        begin = len(context.before) + PREFIX

        # Add one position of padding on the left, so that the talker receives the mask and adds the marks (see the
        # module docstring).
        padding = text.new_zeros(1, text.shape[1])
        embeddings = torch.cat([padding, text[:begin]])[None]
        mask = torch.ones(1, 1 + begin, dtype=torch.int64, device=device)
        mask[0, 0] = 0
        codec_ids = [settings.tts_codec_mask_token_id] * (1 + len(context.before)) + self.marks(notes).tolist()
        text_ids = [
            settings.tts_text_pad_token_id,
            *context.before.tolist(),
            int(notes["voice"]),
            int(ids[begin - PREFIX]),
        ]
        ending = [settings.tts_codec_pad_token_id, self.end_id]  # the model's own `generate` stops at either of them
        no_codes = range(self.sizes[0], settings.vocab_size)
        result = self.generate_codes(
            context,
            options,
            sampling,
            input_ids=torch.tensor([codec_ids], device=device),
            input_text_ids=torch.tensor([text_ids], device=device),
            inputs_embeds=embeddings,
            attention_mask=mask,
            thinker_reply_part=text[None, begin:],
            eos_token_id=ending,
            pad_token_id=settings.tts_codec_pad_token_id,
            suppress_tokens=[id for id in no_codes if id not in ending],
            use_audio_in_video=any(item.size.inside for item in context.items),
        )
        codes: torch.Tensor = result[0, len(codec_ids) :]
        is_code = ~torch.isin(codes, torch.tensor(ending, device=device))
        return codes[is_code.cumprod(0).bool()][:, None]

    def render(self, targets: torch.Tensor, options: Mapping[str, Any]) -> Any:
        """Return audio samples at `RATE`.

        The codec generates audio from random noise. The seed is fixed, so the same codes give the same audio.
        """
        if not len(targets):
            return np.zeros(0, np.float32)
        voice = self.voices_by_name[self.voice(options.get("speaker"), "--speaker")]
        codec = self.model.token2wav.float()  # decode in fp32, as the model's own `generate` does
        device = targets.device
        with torch.random.fork_rng():
            torch.manual_seed(0)
            wave = codec(
                targets[:, 0][None],
                conditioning=voice.conditioning.to(device),
                reference_mel=voice.reference.to(device),
            )
        samples: torch.Tensor = wave
        return samples.reshape(-1).float().cpu().numpy()
