"""Talkers of Qwen omni models: followers that learn the audio codes of spoken responses.

This file contains the common part. qwen3_talker.py and qwen2_5_talker.py build the inputs of each model as its own
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
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.decoders.precomputed_speech import read_codes
from omnizoo.modalities.files.audio import write_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS
from omnizoo.modalities.flop_count import FlopCounter, causal_pairs, weights_of
from omnizoo.modalities.item import Ids, Inputs, MediaItem, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.hf_private import PACKED, attention_name, language_model
from omnizoo.ops.device import to_device
from omnizoo.recipes.shared.decoders import generate_arguments, seeded
from omnizoo.recipes.shared.encoders import UsesModel
from omnizoo.recipes.shared.qwen_image import media_shapes
from omnizoo.recipes.shared.talker_inputs import TalkerContext, TalkerFollower

RATE = 24_000  # samples per second of the codecs' output
# Defaults of the models' own `generate`.
REPETITION_PENALTY = 1.05
MAX_FRAMES = 4096
OPTIONS = "model.modalities.speech.decoder.options"


class Talker(UsesModel, TalkerFollower):
    """Base class of talkers. They speak with the voices of the model.

    Args:
        speaker: Voice for rows that do not name one.
        codec: Plugin that converts audio samples to codes.
        max_frames: Maximum number of frames of a response.
    """

    item_options = ("speaker", *AUDIO_OPTIONS)
    values = ("codes",)
    speakers: Mapping[str, int]  # token id of each speaker
    no_speakers: ClassVar[str] = "It has no speakers."  # advice in the error message if there are no speakers
    end_id: int  # code that follows the last frame
    depth: int | None = None  # thinker layer whose hidden states are used; if None, hidden states after the final norm

    def __init__(self, model: PreTrainedModel, speaker: str | None, codec: str | None, max_frames: int) -> None:
        super().__init__(model)
        config: Any = model.config
        self.config = config
        self.settings = config.talker_config
        if not isinstance(max_frames, int) or max_frames < 1:
            raise UserError(f"{OPTIONS}.max_frames: {max_frames!r} is not valid; expected an integer, at least 1")
        self.speaker = speaker
        self.max_frames = max_frames
        self.codec: Callable[..., Any] | None = None
        if codec is not None:
            self.codec = resolve(codec, f"{OPTIONS}.codec", "a function (samples, samples per second) -> codes")
        self.term_weights = {"": 1.0}

    def set_up(self, speakers: Mapping[str, int], sizes: Sequence[int], *attending: PreTrainedModel) -> None:
        """Set the speakers and the sizes of the codebooks.

        Args:
            attending: Submodels that run over packed sequences.
        """
        self.speakers = {name.lower(): id for name, id in speakers.items()}
        self.sizes = sizes
        if self.speaker is not None and str(self.speaker).lower() not in self.speakers:
            raise UserError(f"{OPTIONS}.speaker: the model has no voice {self.speaker!r}. Use one of {self.voices}.")
        if attention_name(self.model) == PACKED:
            for submodel in attending:
                submodel.config._attn_implementation = PACKED

    @property
    def talker(self) -> Any:
        return self.model.talker

    @property
    def voices(self) -> str:
        """Names of the speakers, for error messages."""
        return ", ".join(self.speakers) or "none"

    def measure(self, media: Media) -> MediaSize:
        frames = len(self.read_codes(media))
        self.voice(media.options.get("speaker"), media.name)
        residual_codebooks = len(self.sizes) - 1
        return MediaSize(
            num_placeholders=0, cost=0.0, targets=frames + 1, num_residual_targets=frames * residual_codebooks
        )

    def read_codes(self, media: Media) -> Any:
        """Return the codes `[frames, codebooks]` of an item."""
        return read_codes(media, self.sizes, self.max_frames, self.codec, RATE)

    def voice(self, speaker: Any, what: str) -> str:
        """Return the key of `speaker` in `speakers`. If `speaker` is None, use `self.speaker` or the only speaker.

        Error messages begin with `what`.
        """
        speaker = speaker if speaker is not None else self.speaker
        if speaker is None and len(self.speakers) == 1:
            return next(iter(self.speakers))
        if speaker is None:
            raise BadMedia(
                f"{what}: `speaker` is not set. Use one of {self.voices}, or set options.speaker for all rows."
            )
        if not isinstance(speaker, str) or speaker.lower() not in self.speakers:
            advice = f"Use one of {self.voices}." if self.speakers else self.no_speakers
            raise BadMedia(f"{what}: the model has no speaker {speaker!r}. {advice}")
        return speaker.lower()

    def prepare(self, media: Media) -> Inputs:
        voice = self.speakers[self.voice(media.options.get("speaker"), media.name)]
        return {"codes": torch.from_numpy(self.read_codes(media)), "voice": torch.tensor([voice])}

    def locate_item(self, ids: Ids, items: Sequence[MediaItem], item: MediaItem, answers: int) -> MediaItem:
        assert item.answer is not None
        inputs_of_thinker = [other for other in items if other.answer is None]
        context = self.find_context(ids, inputs_of_thinker, item.answer, answers, item.media.name)
        frames = item.targets - 1
        notes = self.notes(context, frames)
        cost = self.flops(context.rows, len(notes["source"]), frames)
        size = replace(item.size, num_placeholders=context.rows, cost=cost)
        return replace(item, spans=tuple(context.spans), size=size, notes=notes)

    @contextmanager
    def capture(self) -> Iterator[list[torch.Tensor]]:
        """Context manager that captures the thinker's embeddings and its hidden states at `depth`."""
        states: list[torch.Tensor] = []
        language: Any = language_model(self.model)
        depth = len(language.layers) if self.depth is None else self.depth
        last = language if depth >= len(language.layers) else language.layers[max(depth - 1, 0)]

        def capture_embeddings(module: nn.Module, args: Any) -> None:
            states[:] = [args[0]]

        def capture_hidden(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            states.append(hidden if depth else states[0])

        handles = [
            language.layers[0].register_forward_pre_hook(capture_embeddings),
            last.register_forward_hook(capture_hidden),
        ]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def media_ids(self) -> list[int]:
        """Ids of the placeholder tokens of all modalities."""
        thinker = self.config.thinker_config
        return [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]

    def is_media(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of the placeholder tokens."""
        return torch.isin(ids, self.constants(self.media_ids, ids.device))

    def text_inputs(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        """Return the text embedding at each position of the talker's sequences, `[positions, width]`."""
        raise NotImplementedError

    def marks(self, item: Inputs) -> torch.Tensor:
        """Return the codec ids at the last positions before the first frame."""
        raise NotImplementedError

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """Embed codes: `[frames, codebooks]` -> `[frames, codebooks, width]`."""
        raise NotImplementedError

    def layer_inputs(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the talker's layers, from the sums of text and code embeddings."""
        return embeddings

    def further_losses(
        self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return losses of each frame in addition to the loss of the first codebook, `[frames]` for each term.

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
        positions = []
        for end, item_marks in zip(ends, marks, strict=True):
            positions.append(torch.arange(end - len(item_marks), end, device=embeddings.device))
        values = self.talker.get_input_embeddings()(torch.cat(marks))
        return embeddings.index_add(0, torch.cat(positions), values.to(embeddings.dtype))

    def constants(self, ids: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return ids as a tensor on the device, without a host sync."""
        return to_device(torch.tensor(ids), device)

    def loss(self, rows: torch.Tensor, items: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        if self.talker.model.config._attn_implementation != PACKED:
            raise UserError("model.attention: speech is trained with packed attention only. Set it to auto.")
        device = rows.device
        lengths = [len(item["source"]) for item in items]
        frames = [len(item["codes"]) for item in items]
        ends = np.cumsum(lengths).tolist()
        begins = [end - count for end, count in zip(ends, frames, strict=True)]  # position of the first frame
        codes = torch.cat([item["codes"] for item in items])
        spoken = self.embed(codes)

        embeddings = self.with_marks(self.text_inputs(rows, items), items, begins)
        frame_positions = _concatenated_ranges(begins, ends, device)
        embeddings = embeddings.index_add(0, frame_positions, spoken.sum(1).to(embeddings.dtype))
        text_positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        axes = torch.cat([item["positions"] for item in items], 1).view(torch.float64).float()
        boundaries = to_device(torch.tensor([0, *ends], dtype=torch.int32), device)
        hidden = self.talker.model(
            inputs_embeds=self.layer_inputs(embeddings)[None],
            position_ids=torch.cat([text_positions[None], axes])[:, None],
            **packed(boundaries, max(lengths)),
        ).last_hidden_state[0]

        # The position before a frame predicts this frame; the position of the last frame predicts `end_id`.
        before_begins = [begin - 1 for begin in begins]
        end_code = self.constants([self.end_id], device)
        targets = torch.cat([part for item in items for part in (item["codes"][:, 0], end_code)])
        logits = self.talker.codec_head(hidden.index_select(0, _concatenated_ranges(before_begins, ends, device)))
        before_ends = [end - 1 for end in ends]
        predicting = hidden.index_select(0, _concatenated_ranges(before_begins, before_ends, device))
        losses = {"": sum_by_item(code_loss(logits, targets), [count + 1 for count in frames])}
        for term, frame_losses in self.further_losses(predicting, spoken, codes).items():
            losses[term] = sum_by_item(frame_losses, frames)
        return losses

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        """FLOPs per thinker row, per position and per pair of positions, and additional FLOPs per frame."""
        raise NotImplementedError

    def count_layers(self, position: FlopCounter) -> FlopCounter:
        """Add the talker's layers to the FLOPs of a position, and return the FLOPs of a pair of positions."""
        text = self.talker.model.config
        for name, parameter, is_multiplied in weights_of(self.talker.model):
            if is_multiplied:
                share = text.num_experts_per_tok / text.num_experts if "experts" in name.split(".") else 1
                position.multiply(parameter, share)
        layers = self.talker.model.layers
        pair = FlopCounter(position.trained)
        pair.attend(len(layers), text.num_attention_heads * layers[0].self_attn.head_dim)
        return pair

    def flops(self, rows: int, positions: int, frames: int) -> float:
        """Return the FLOPs of a response, given its number of thinker rows, talker positions and frames."""
        per_row, per_position, per_pair, per_frame = self.work
        pairs = causal_pairs(positions)
        return rows * per_row + positions * per_position + pairs * per_pair + frames * per_frame

    def generation_inputs(
        self, ids: Ids, items: Sequence[MediaItem], options: Mapping[str, Any], device: torch.device
    ) -> tuple[TalkerContext, Inputs]:
        """Return the talker's context and inputs, to generate speech for the last response of a conversation.

        The inputs include the voice. They have one frame for each text token of the response except the first, one for
        the end of the text, and one for padding.
        """
        try:
            context = self.find_context(ids, items, -1, None, "response")
            voice = self.speakers[self.voice(options.get("speaker"), "--speaker")]
        except BadMedia as error:
            raise UserError(str(error)) from None
        notes = {name: tensor.to(device) for name, tensor in self.notes(context, context.text + 1).items()}
        return context, notes | {"voice": torch.tensor([voice], device=device)}

    def generate_codes(
        self, context: TalkerContext, options: Mapping[str, Any], sampling: Sampling, **inputs: Any
    ) -> Any:
        """Return the result of the talker's own `generate`."""
        renamed = {"audio_seqlens": "audio_feature_lengths", "second_per_grids": "video_second_per_grid"}
        for name, shapes in media_shapes(context.items).items():
            if shapes is not None:
                inputs[renamed.get(name, name)] = shapes.to(inputs["inputs_embeds"].device)
        with seeded(sampling):
            return self.talker.generate(
                max_new_tokens=options.get("max_frames") or MAX_FRAMES,
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


def sum_by_item(losses: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sum of the losses of each item, `[items]`, given the number of losses of each item."""
    return torch.stack([part.sum() for part in losses.split(list(counts))])


def _concatenated_ranges(starts: Sequence[int], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """Concatenate the ranges of integers from each start up to, but not including, the corresponding end."""
    ranges = [torch.arange(start, end, device=device) for start, end in zip(starts, ends, strict=True)]
    return torch.cat(ranges)
