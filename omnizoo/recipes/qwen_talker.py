"""Talkers of published Qwen omni models: they follow the thinker, and learn the codes of spoken answers.

Here is what they share; qwen3_talker.py and qwen2_5_talker.py have what each reads, wired as the model's own `generate`
wires it. All of a rank's answers are one packed sequence; nothing is read back from the device.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.doors import resolve
from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Ids, Inputs, Item, Sampling, Size
from omnizoo.modalities.files import SOUND_OPTIONS
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.spoken import read_codes, write_sound
from omnizoo.modalities.tally import Tally, causal_pairs, weights_of
from omnizoo.models.hf_private import PACKED, attention_name, language_model
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.ops.device import to_device
from omnizoo.recipes.qwen_hearing import Heard, Hearing

RATE = 24_000  # samples a second of what the codecs make
# Of the models' own `generate`:
REPETITION_PENALTY, MOST_FRAMES = 1.05, 4096
OPTIONS = "model.modalities.speech.decoder.options"


class Talker(Hearing):
    """Speech in the voices that the model has. `speaker`: of rows that do not name one; `codec`: makes codes of
    sound."""

    item_options = ("speaker", *SOUND_OPTIONS)
    values = ("codes",)
    sizes: Sequence[int]  # of its codebooks
    speakers: Mapping[str, int]  # the token that stands for each
    no_speakers: ClassVar[str] = ""  # what to do about it

    def __init__(self, model: PreTrainedModel, speaker: str | None, codec: str | None, max_frames: int) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        config: Any = model.config
        self.config, self.settings = config, config.talker_config
        if not isinstance(max_frames, int) or max_frames < 1:
            raise UserError(f"{OPTIONS}.max_frames: {max_frames!r}; expected a whole number, at least 1")
        self.speaker, self.max_frames = speaker, max_frames
        self.codec: Callable[..., Any] | None = None
        if codec is not None:
            self.codec = resolve(codec, f"{OPTIONS}.codec", "a function (samples, samples per second) -> codes")
        self.terms = {"": 1.0}

    def set_up(self, speakers: Mapping[str, int], sizes: Sequence[int], *attending: PreTrainedModel) -> None:
        """`attending`: models that run over packed sequences."""
        self.speakers, self.sizes = {name.lower(): id for name, id in speakers.items()}, sizes
        if self.speaker is not None and str(self.speaker).lower() not in self.speakers:
            raise UserError(
                f"{OPTIONS}.speaker: {self.speaker!r} is no voice of this model; expected one of {self.voices}"
            )
        if attention_name(self.model) == PACKED:
            for part in attending:
                part.config._attn_implementation = PACKED

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def talker(self) -> Any:
        return self.model.talker

    @property
    def voices(self) -> str:
        return ", ".join(self.speakers) or "none"

    def measure(self, media: Media) -> Size:
        frames = len(self.read_codes(media))
        self.voice(media.options.get("speaker"), media.name)
        return Size(0, 0.0, frames + 1, frames * (len(self.sizes) - 1))

    def read_codes(self, media: Media) -> Any:
        return read_codes(media, self.sizes, self.max_frames, self.codec, RATE)

    def voice(self, given: Any, what: str) -> str:
        """A speaker's name as `speakers` has it."""
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

    def follow(self, ids: Ids, items: Sequence[Item], item: Item, answers: int) -> Item:
        assert item.answer is not None
        heard = self.hear(ids, [i for i in items if i.answer is None], item.answer, answers, item.media.name)
        frames = item.targets - 1
        notes = self.notes(heard, frames)
        size = replace(item.size, places=heard.rows, cost=self.flops(heard.rows, len(notes["source"]), frames))
        return replace(item, spans=tuple(heard.spans), size=size, notes=notes)

    @property
    def depth(self) -> int | None:
        """After how many layers the thinker's hidden states are read; None: at its end, behind the last norm."""
        raise NotImplementedError

    @contextmanager
    def reading(self) -> Iterator[list[torch.Tensor]]:
        """The thinker's embeddings, and its hidden states at `depth`."""
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
        return sum((ids == id for id in self.media_ids), torch.zeros_like(ids, dtype=torch.bool))

    def told(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        """`[L, width]`: the text in each place of the talker's sequence."""
        raise NotImplementedError

    def marks(self, item: Inputs) -> torch.Tensor:
        """Codec ids in the last places before the first frame."""
        raise NotImplementedError

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """`[frames, codebooks]` -> `[frames, codebooks, width]`."""
        raise NotImplementedError

    def enter(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What the talker's layers get of text and codes together."""
        return embeddings

    def further_losses(
        self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Beyond that on the first codebook; `hidden` is that which predicts each frame."""
        return {}

    @property
    def end_id(self) -> int:
        """The code that says that the speech ends."""
        raise NotImplementedError

    def with_marks(self, embeddings: torch.Tensor, items: Sequence[Inputs], ends: Sequence[int]) -> torch.Tensor:
        """`embeddings [L, width]` with what stands before the first frame of each item; `ends`: its places."""
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
        begins = [end - n for end, n in zip(ends, frames, strict=True)]  # of frames
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
        # The place before a frame predicts it, and that of the last one that it is the last.
        before = [torch.arange(begin - 1, end, device=device) for begin, end in zip(begins, ends, strict=True)]
        last = self.constants([self.end_id], device)
        wanted = torch.cat([part for item in items for part in (item["codes"][:, 0], last)])
        logits = self.talker.codec_head(hidden.index_select(0, torch.cat(before)))
        predicting = hidden.index_select(0, torch.cat([place[:-1] for place in before]))
        return {"": cross_entropy_sum(logits, wanted), **self.further_losses(predicting, spoken, codes)}

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        """FLOPs of a row, of a place, of a pair of places, and of a frame besides."""
        raise NotImplementedError

    def tally_layers(self, place: Tally) -> Tally:
        """Adds the talker's layers to the work of a place; returns that of a pair of places."""
        text = self.talker.model.config
        for name, parameter, is_multiplied in weights_of(self.talker.model):
            if is_multiplied:
                share = text.num_experts_per_tok / text.num_experts if "experts" in name.split(".") else 1
                place.multiply(parameter, share)
        pair, layers = Tally(place.trained), self.talker.model.layers
        pair.attend(len(layers), text.num_attention_heads * layers[0].self_attn.head_dim)
        return pair

    def flops(self, rows: int, places: int, frames: int) -> float:
        per_row, per_place, per_pair, per_frame = self.work
        return rows * per_row + places * per_place + causal_pairs(places) * per_pair + frames * per_frame

    def asked(
        self, ids: Ids, items: Sequence[Item], options: Mapping[str, Any], device: torch.device
    ) -> tuple[Heard, Inputs]:
        """What is heard of a conversation that ends in the answer, and its notes with the voice: as if there were a
        frame for each token of the answer but the first, for its end, and one more."""
        try:
            heard = self.hear(ids, items, -1, None, "the answer")
            voice = self.speakers[self.voice(options.get("speaker"), "--speaker: the answer")]
        except BadMedia as bad:
            raise UserError(str(bad)) from None
        notes = {name: tensor.to(device) for name, tensor in self.notes(heard, heard.text + 1).items()}
        return heard, notes | {"voice": torch.tensor([voice], device=device)}

    def save(self, item: Any, stem: str) -> str:
        return write_sound(item, RATE, stem)


def packed(starts: torch.Tensor, longest: int) -> dict[str, Any]:
    """What tells attention where sequences begin."""
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {"use_cache": False, **lengths}


def drawn_by(sampling: Sampling) -> dict[str, Any]:
    """In the words of transformers' `generate`."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    limits = {"top_k": sampling.top_k, "top_p": sampling.top_p}
    return {"do_sample": True, "temperature": sampling.temperature, **limits}


@contextmanager
def seeded(sampling: Sampling) -> Iterator[None]:
    """transformers draws from torch's own stream of random numbers: there it begins where `sampling` is."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Passing `repetition_penalty`")  # only codes are repeated
        if sampling.generator is not None:
            device = sampling.generator.device
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=sampling.generator, device=device)))
        yield
