"""Talkers of Qwen omni models: followers that learn the audio codes of spoken responses.

This file has the common part. qwen3_talker.py and qwen2_5_talker.py build the inputs of each model as its own
`generate` does. In training, all responses of a rank form one packed sequence, and there is no host sync.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.plugins import resolve
from omnizoo.modalities.decoders.precomputed_speech import read_codes
from omnizoo.modalities.files.audio import write_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS
from omnizoo.modalities.flop_count import FlopCounter, causal_pairs, weights_of
from omnizoo.modalities.item import Ids, Inputs, MediaItem, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.hf_private import PACKED, attention_name, language_model
from omnizoo.ops.device import to_device
from omnizoo.ops.loss.cross_entropy import cross_entropy_sum
from omnizoo.recipes.shared.decoders import generate_arguments, seeded
from omnizoo.recipes.shared.encoders import UsesModel
from omnizoo.recipes.shared.qwen_image import media_shapes
from omnizoo.recipes.shared.talker_inputs import TalkerContext, TalkerFollower

RATE = 24_000  # samples per second of the codecs' output
# Defaults of the models' own `generate`.
REPETITION_PENALTY, MOST_FRAMES = 1.05, 4096
OPTIONS = "model.modalities.speech.decoder.options"


class Talker(UsesModel, TalkerFollower):
    """Base class of talkers, which speak with the voices that the model has.

    Args:
        speaker: Voice for rows that do not name one.
        codec: Plugin that converts audio samples to codes.
        max_frames: Maximum number of frames of a response.
    """

    item_options = ("speaker", *AUDIO_OPTIONS)
    values = ("codes",)
    speakers: Mapping[str, int]  # token id of each speaker
    no_speakers: ClassVar[str] = ""  # advice in the error message if there are no speakers
    end_id: int  # code that follows the last frame
    depth: int | None = None  # thinker layer whose hidden states are used; None: after the final norm

    def __init__(self, model: PreTrainedModel, speaker: str | None, codec: str | None, max_frames: int) -> None:
        super().__init__(model)
        config: Any = model.config
        self.config, self.settings = config, config.talker_config
        if not isinstance(max_frames, int) or max_frames < 1:
            raise UserError(f"{OPTIONS}.max_frames: {max_frames!r}; expected a whole number, at least 1")
        self.speaker, self.max_frames = speaker, max_frames
        self.codec: Callable[..., Any] | None = None
        if codec is not None:
            self.codec = resolve(codec, f"{OPTIONS}.codec", "a function (samples, samples per second) -> codes")
        self.term_weights = {"": 1.0}

    def set_up(self, speakers: Mapping[str, int], sizes: Sequence[int], *attending: PreTrainedModel) -> None:
        """Set the speakers and the sizes of the codebooks.

        Args:
            attending: Submodels that run over packed sequences.
        """
        self.speakers, self.sizes = {name.lower(): id for name, id in speakers.items()}, sizes
        if self.speaker is not None and str(self.speaker).lower() not in self.speakers:
            raise UserError(
                f"{OPTIONS}.speaker: {self.speaker!r} is no voice of this model; expected one of {self.voices}"
            )
        if attention_name(self.model) == PACKED:
            for part in attending:
                part.config._attn_implementation = PACKED

    @property
    def talker(self) -> Any:
        return self.model.talker

    @property
    def voices(self) -> str:
        return ", ".join(self.speakers) or "none"

    def measure(self, media: Media) -> MediaSize:
        frames = len(self.read_codes(media))
        self.voice(media.options.get("speaker"), media.name)
        return MediaSize(0, 0.0, frames + 1, frames * (len(self.sizes) - 1))

    def read_codes(self, media: Media) -> Any:
        return read_codes(media, self.sizes, self.max_frames, self.codec, RATE)

    def voice(self, given: Any, what: str) -> str:
        """Return the name of a speaker as a key of `speakers`; `self.speaker` if `given` is None."""
        given = given if given is not None else self.speaker
        if given is None and len(self.speakers) == 1:
            return next(iter(self.speakers))
        if given is None:
            raise BadMedia(f"{what} has no `speaker`; expected one of {self.voices}, or options.speaker for all rows")
        if not isinstance(given, str) or given.lower() not in self.speakers:
            raise BadMedia(
                f"{what} has the speaker {given!r}, which the model does not know; expected one of {self.voices}"
                + ("" if self.speakers else self.no_speakers)
            )
        return given.lower()

    def prepare(self, media: Media) -> Inputs:
        voice = self.speakers[self.voice(media.options.get("speaker"), media.name)]
        return {"codes": torch.from_numpy(self.read_codes(media)), "voice": torch.tensor([voice])}

    def locate_item(self, ids: Ids, items: Sequence[MediaItem], item: MediaItem, answers: int) -> MediaItem:
        assert item.answer is not None
        heard = self.hear(ids, [i for i in items if i.answer is None], item.answer, answers, item.media.name)
        frames = item.targets - 1
        notes = self.notes(heard, frames)
        size = replace(
            item.size, num_placeholders=heard.rows, cost=self.flops(heard.rows, len(notes["source"]), frames)
        )
        return replace(item, spans=tuple(heard.spans), size=size, notes=notes)

    @contextmanager
    def capture(self) -> Iterator[list[torch.Tensor]]:
        """Context manager: capture the thinker's embeddings and its hidden states at `depth`."""
        kept: list[torch.Tensor] = []
        language: Any = language_model(self.model)
        depth = len(language.layers) if self.depth is None else self.depth
        last = language if depth >= len(language.layers) else language.layers[max(depth - 1, 0)]

        def first(module: nn.Module, args: Any) -> None:
            kept[:] = [args[0]]

        def then(module: nn.Module, args: Any, out: Any) -> None:
            hidden = out if isinstance(out, torch.Tensor) else out[0]
            kept.append(hidden if depth else kept[0])

        handles = [language.layers[0].register_forward_pre_hook(first), last.register_forward_hook(then)]
        try:
            yield kept
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def media_ids(self) -> list[int]:
        thinker = self.config.thinker_config
        return [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]

    def is_media(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.isin(ids, self.constants(self.media_ids, ids.device))

    def told(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        """Return the text embeddings at each position of the talker's sequences, `[positions, width]`."""
        raise NotImplementedError

    def marks(self, item: Inputs) -> torch.Tensor:
        """Return the codec ids at the last positions before the first frame."""
        raise NotImplementedError

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Embed codes: `[frames, codebooks]` -> `[frames, codebooks, width]`."""
        raise NotImplementedError

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the talker's layers, from the sums of text and code embeddings."""
        return embeddings

    def further_losses(
        self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return losses in addition to the loss of the first codebook.

        Args:
            hidden: Hidden states that predict each frame, `[frames, width]`.
            spoken: Embedded codes, `[frames, codebooks, width]`.
            codes: Codes, `[frames, codebooks]`.
        """
        return {}

    def with_marks(self, embeddings: torch.Tensor, items: Sequence[Inputs], ends: Sequence[int]) -> torch.Tensor:
        """Return `embeddings [positions, width]` with the embedded `marks` added before the first frame of each item.

        Args:
            ends: Position of the first frame of each item.
        """
        marks = [self.marks(item) for item in items]
        places = [
            torch.arange(end - len(own), end, device=embeddings.device) for end, own in zip(ends, marks, strict=True)
        ]
        values = self.talker.get_input_embeddings()(torch.cat(marks))
        return embeddings.index_add(0, torch.cat(places), values.to(embeddings.dtype))

    def constants(self, ids: Sequence[int], device: torch.device) -> torch.Tensor:
        return to_device(torch.tensor(ids), device)

    def loss(self, rows: torch.Tensor, items: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        if self.talker.model.config._attn_implementation != PACKED:
            raise UserError("model.attention: speech is learnt in packed sequences; leave the key at `auto`")
        device = rows.device
        lengths, frames = [len(item["source"]) for item in items], [len(item["codes"]) for item in items]
        ends = np.cumsum(lengths).tolist()
        begins = [end - n for end, n in zip(ends, frames, strict=True)]  # position of the first frame of each item
        codes = torch.cat([item["codes"] for item in items])
        spoken = self.embed(codes)
        embeddings = self.with_marks(self.told(rows, items), items, begins)
        places = [torch.arange(begin, end, device=device) for begin, end in zip(begins, ends, strict=True)]
        embeddings = embeddings.index_add(0, torch.cat(places), spoken.sum(1).to(embeddings.dtype))
        counted = torch.cat([torch.arange(n, device=device) for n in lengths])
        axes = torch.cat([item["positions"] for item in items], 1).view(torch.float64).float()
        hidden = self.talker.model(
            inputs_embeds=self.enter(embeddings)[None],
            position_ids=torch.cat([counted[None], axes])[:, None],
            **packed(to_device(torch.tensor([0, *ends], dtype=torch.int32), device), max(lengths)),
        ).last_hidden_state[0]
        # The position before a frame predicts this frame; the position of the last frame predicts `end_id`.
        before = [torch.arange(begin - 1, end, device=device) for begin, end in zip(begins, ends, strict=True)]
        last = self.constants([self.end_id], device)
        wanted = torch.cat([part for item in items for part in (item["codes"][:, 0], last)])
        logits = self.talker.codec_head(hidden.index_select(0, torch.cat(before)))
        predicting = hidden.index_select(0, torch.cat([place[:-1] for place in before]))
        return {"": cross_entropy_sum(logits, wanted), **self.further_losses(predicting, spoken, codes)}

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        """FLOPs per thinker row, per position, per pair of positions, and in addition per frame."""
        raise NotImplementedError

    def count_layers(self, place: FlopCounter) -> FlopCounter:
        """Add the talker's layers to the FLOPs of a position, and return the FLOPs of a pair of positions."""
        text = self.talker.model.config
        for name, parameter, is_multiplied in weights_of(self.talker.model):
            if is_multiplied:
                share = text.num_experts_per_tok / text.num_experts if "experts" in name.split(".") else 1
                place.multiply(parameter, share)
        pair, layers = FlopCounter(place.trained), self.talker.model.layers
        pair.attend(len(layers), text.num_attention_heads * layers[0].self_attn.head_dim)
        return pair

    def flops(self, rows: int, places: int, frames: int) -> float:
        per_row, per_placeholder, per_pair, per_frame = self.work
        return rows * per_row + places * per_placeholder + causal_pairs(places) * per_pair + frames * per_frame

    def asked(
        self, ids: Ids, items: Sequence[MediaItem], options: Mapping[str, Any], device: torch.device
    ) -> tuple[TalkerContext, Inputs]:
        """Return the talker's context for a conversation that ends in the response, and its inputs with the voice.

        The inputs have a frame for each text token of the response except the first, one for its end, and one more.
        """
        try:
            heard = self.hear(ids, items, -1, None, "the answer")
            voice = self.speakers[self.voice(options.get("speaker"), "--speaker: the answer")]
        except BadMedia as bad:
            raise UserError(str(bad)) from None
        notes = {name: tensor.to(device) for name, tensor in self.notes(heard, heard.text + 1).items()}
        return heard, notes | {"voice": torch.tensor([voice], device=device)}

    def generate_codes(
        self, heard: TalkerContext, options: Mapping[str, Any], sampling: Sampling, **inputs: Any
    ) -> Any:
        """Return the result of the talker's own `generate`."""
        renamed = {"audio_seqlens": "audio_feature_lengths", "second_per_grids": "video_second_per_grid"}
        for name, shapes in media_shapes(heard.items).items():
            if shapes is not None:
                inputs[renamed.get(name, name)] = shapes.to(inputs["inputs_embeds"].device)
        with seeded(sampling):
            return self.talker.generate(
                max_new_tokens=options.get("max_frames") or MOST_FRAMES,
                repetition_penalty=REPETITION_PENALTY,
                **generate_arguments(sampling),
                **inputs,
            )

    def save(self, item: Any, stem: str) -> str:
        return write_audio(item, RATE, stem)


def packed(starts: torch.Tensor, longest: int) -> dict[str, Any]:
    """Return arguments that pass sequence boundaries to packed attention."""
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {"use_cache": False, **lengths}
