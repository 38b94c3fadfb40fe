"""The talker of the published Qwen3 omni models: it follows the thinker, and learns the codes of spoken answers.

What it reads is wired as the model's own `generate` wires it: of the user's turns, text as the thinker's embeddings and
media as hidden states from the middle of the thinker; then the answer's text, a token with each frame of speech. All of
a rank's answers are one packed sequence; nothing is read back from the device.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

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
from omnizoo.modalities.tally import Tally, causal_pairs, is_trained, weights_of
from omnizoo.models.hf_private import PACKED, attention_name, language_model
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.ops.device import to_device
from omnizoo.recipes.qwen_hearing import BOS, EOS, HEADER, PAD, PREFIX, Hearing

RATE = 24_000  # samples a second of what the codec makes
RESERVED = 1024  # ids at the end of the talker's vocabulary that are no codes
# Of the model's own `generate`:
REPETITION_PENALTY, MOST_FRAMES = 1.05, 4096


class Talker(Hearing):
    """Speech in the voices that the model has. `speaker`: of rows that do not name one; `codec`: makes codes of sound;
    `residual_weight`: of the loss on all codebooks but the first, against that on the first."""

    item_options = ("speaker", *SOUND_OPTIONS)
    values = ("codes",)

    def __init__(
        self,
        model: PreTrainedModel,
        speaker: str | None = None,
        codec: str | None = None,
        residual_weight: float = 1.0,
        max_frames: int = 8192,
    ) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        config: Any = model.config
        self.config, self.settings = config, config.talker_config
        self.codebooks: int = self.settings.num_code_groups
        first = min(self.settings.text_config.vocab_size - RESERVED, config.code2wav_config.codebook_size)
        later = min(self.settings.code_predictor_config.vocab_size, config.code2wav_config.codebook_size)
        self.sizes = [first] + [later] * (self.codebooks - 1)
        self.speakers: dict[str, int] = {name.lower(): id for name, id in (self.settings.speaker_id or {}).items()}
        if speaker is not None and str(speaker).lower() not in self.speakers:
            raise UserError(
                f"model.modalities.speech.decoder.options.speaker: {speaker!r} is no voice of this model; expected one "
                f"of {', '.join(self.speakers)}"
            )
        self.speaker, self.max_frames = speaker, max_frames
        options = "model.modalities.speech.decoder.options"
        if not isinstance(residual_weight, int | float) or not 0 <= residual_weight < math.inf:
            raise UserError(f"{options}.residual_weight: {residual_weight!r}; expected a number, at least 0")
        if not isinstance(max_frames, int) or max_frames < 1:
            raise UserError(f"{options}.max_frames: {max_frames!r}; expected a whole number, at least 1")
        self.codec: Callable[..., Any] | None = None
        if codec is not None:
            self.codec = resolve(codec, f"{options}.codec", "a function (samples, samples per second) -> codes")
        self.terms = {"": 1.0, "residual": residual_weight}
        if attention_name(model) == PACKED:
            for part in (self.talker.model, self.talker.code_predictor.model):
                part.config._attn_implementation = PACKED

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def talker(self) -> Any:
        return self.model.talker

    def measure(self, media: Media) -> Size:
        frames = len(self.read_codes(media))
        self.voice(media.options.get("speaker"), media.name)
        return Size(0, 0.0, frames + 1, frames * (self.codebooks - 1))

    def read_codes(self, media: Media) -> Any:
        return read_codes(media, self.sizes, self.max_frames, self.codec, RATE)

    def voice(self, name: Any, what: str) -> int:
        """The id of a speaker's name."""
        name = name if name is not None else self.speaker
        if name is None and len(self.speakers) == 1:
            return next(iter(self.speakers.values()))
        known = ", ".join(self.speakers) or "none"
        if name is None:
            raise BadMedia(f"{what} has no `speaker`; expected one of {known}, or options.speaker for all rows")
        if not isinstance(name, str) or name.lower() not in self.speakers:
            raise BadMedia(f"{what} has the speaker {name!r}, which the model does not know; expected one of {known}")
        return self.speakers[name.lower()]

    def prepare(self, media: Media) -> Inputs:
        voice = self.voice(media.options.get("speaker"), media.name)
        return {"codes": torch.from_numpy(self.read_codes(media)), "voice": torch.tensor([voice])}

    def follow(self, ids: Ids, items: Sequence[Item], item: Item, answers: int) -> Item:
        assert item.answer is not None
        heard = self.hear(ids, [i for i in items if i.answer is None], item.answer, answers, item.media.name)
        frames = item.targets - 1
        notes = self.notes(heard, frames)
        rows, places = self.rows(notes), len(notes["source"])
        size = replace(item.size, places=rows, cost=self.flops(rows, places, frames))
        return replace(item, spans=tuple(heard.spans), size=size, notes=notes)

    def blank(self) -> Inputs:
        count = PREFIX + 1
        return {
            "codes": torch.zeros(1, self.codebooks, dtype=torch.int64),
            "voice": torch.zeros(1, dtype=torch.int64),
            "source": torch.tensor([0, 1, 2, PAD, PAD, PAD, PAD, BOS, 3, EOS]),
            "positions": torch.arange(count).expand(3, -1).double().contiguous().view(torch.int64),
            "text": torch.arange(HEADER + 1),
            "media": torch.empty(0, dtype=torch.int64),
        }

    def rows(self, inputs: Inputs) -> int:
        return len(inputs["text"]) + len(inputs["media"])

    @contextmanager
    def reading(self) -> Iterator[list[torch.Tensor]]:
        """The embeddings, and the output of the layer before the one that the talker's config names."""
        kept: list[torch.Tensor] = []
        language: Any = language_model(self.model)
        depth = self.settings.accept_hidden_layer
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

    def read(self, kept: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embeddings, hidden = (states.flatten(0, -2) for states in kept)
        is_media = sum((ids == id for id in self.media_ids), torch.zeros_like(ids, dtype=torch.bool))
        return torch.where(is_media[:, None], hidden, embeddings)

    def told(self, rows: torch.Tensor, items: Sequence[Inputs]) -> torch.Tensor:
        """`[L, width]`: the text in each place of the talker's sequence."""
        talker, device = self.talker, rows.device
        firsts = np.cumsum([0, *(self.rows(item) for item in items)]).tolist()
        text, media = (
            torch.cat([item[name] + first for item, first in zip(items, firsts, strict=False)])
            for name in ("text", "media")
        )
        meaning = [getattr(self.config, f"tts_{name}_token_id") for name in ("pad", "bos", "eos")]
        special = self.model.thinker.get_input_embeddings()(to_device(torch.tensor(meaning), device)).to(rows.dtype)
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

    def with_marks(self, embeddings: torch.Tensor, items: Sequence[Inputs], ends: Sequence[int]) -> torch.Tensor:
        """`embeddings [L, width]` with what stands before the first frame of each item; `ends`: its places."""
        names = ("codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id", "codec_pad_id", "codec_bos_id")
        fixed = to_device(torch.tensor([getattr(self.settings, name) for name in names]), embeddings.device)
        marks = torch.cat([torch.cat([fixed[:3], item["voice"], fixed[3:]]) for item in items])
        at = [torch.arange(end - 6, end, device=embeddings.device) for end in ends]
        values = self.talker.get_input_embeddings()(marks)
        return embeddings.index_add(0, torch.cat(at), values.to(embeddings.dtype))

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """`[frames, codebooks]` -> `[frames, codebooks, width]`."""
        later = self.talker.code_predictor.get_input_embeddings()
        first = self.talker.get_input_embeddings()(codes[:, 0])
        return torch.stack([first, *(table(codes[:, i + 1]) for i, table in enumerate(later))], 1)

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
            inputs_embeds=embeddings[None],
            position_ids=torch.cat([counted[None], axes])[:, None],
            **packed(to_device(torch.tensor([0, *ends], dtype=torch.int32), device), max(lengths)),
        ).last_hidden_state[0]
        # The place before a frame predicts it, and that of the last one that it is the last.
        before = [torch.arange(begin - 1, end, device=device) for begin, end in zip(begins, ends, strict=True)]
        last = to_device(torch.tensor([self.settings.codec_eos_token_id]), device)
        wanted = torch.cat([part for item in items for part in (item["codes"][:, 0], last)])
        logits = self.talker.codec_head(hidden.index_select(0, torch.cat(before)))
        predicting = hidden.index_select(0, torch.cat([place[:-1] for place in before]))
        residual = self.residual_loss(predicting, spoken, codes)
        return {"": cross_entropy_sum(logits, wanted), "residual": residual}

    def residual_loss(self, hidden: torch.Tensor, spoken: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Each frame is a sequence: what predicts it, then its codes; each place predicts the next codebook's."""
        predictor, (frames, books) = self.talker.code_predictor, codes.shape
        inputs = torch.cat([hidden[:, None], spoken[:, :-1].to(hidden.dtype)], 1)
        out = predictor.model(
            inputs_embeds=inputs.flatten(0, 1)[None],
            position_ids=torch.arange(books, device=codes.device).repeat(frames)[None],
            **packed(torch.arange(0, frames * books + 1, books, device=codes.device, dtype=torch.int32), books),
        ).last_hidden_state.view(frames, books, -1)
        losses = [cross_entropy_sum(head(out[:, i + 1]), codes[:, i + 1]) for i, head in enumerate(predictor.lm_head)]
        return torch.stack(losses).sum()

    @cached_property
    def work(self) -> tuple[float, float, float, float]:
        """FLOPs of a row, of a place, of a pair of places, and of a frame besides."""
        talker, predictor, books = self.talker, self.talker.code_predictor, self.codebooks
        row = Tally(is_trained(self.model.thinker))
        row.run(talker.text_projection, 1)
        place = Tally(row.trained)
        text = talker.model.config
        for name, parameter, is_multiplied in weights_of(talker.model):
            if is_multiplied:
                share = text.num_experts_per_tok / text.num_experts if "experts" in name.split(".") else 1
                place.multiply(parameter, share)
        pair = Tally(place.trained)
        pair.attend(len(talker.model.layers), text.num_attention_heads * talker.model.layers[0].self_attn.head_dim)
        frame = Tally(place.trained)
        frame.run(talker.codec_head, 1)
        frame.run(predictor.model.layers, books)
        small = predictor.config
        frame.attend(len(predictor.model.layers) * causal_pairs(books), small.num_attention_heads * small.head_dim)
        frame.run(predictor.lm_head, 1)
        return row.flops, place.flops, pair.flops, frame.flops

    def flops(self, rows: int, places: int, frames: int) -> float:
        per_row, per_place, per_pair, per_frame = self.work
        return rows * per_row + places * per_place + causal_pairs(places) * per_pair + frames * per_frame

    def generate(
        self, states: torch.Tensor, ids: Ids, items: Sequence[Item], options: Mapping[str, Any], sampling: Sampling
    ) -> torch.Tensor:
        try:
            heard = self.hear(ids, items, -1, None, "the answer")
            voice = self.voice(options.get("speaker"), "--speaker: the answer")
        except BadMedia as bad:
            raise UserError(str(bad)) from None
        device, begin = states.device, len(heard.ids) + PREFIX
        rows = torch.cat([states[first : first + count] for first, count in heard.spans])
        # As if there were a frame for each token of the answer, for its end, and one more.
        notes = {name: tensor.to(device) for name, tensor in self.notes(heard, heard.answer - HEADER + 1).items()}
        notes["voice"] = torch.tensor([voice], device=device)
        told = self.told(rows, [notes])
        embeddings = self.with_marks(told[:begin], [notes], [begin])[None]
        vocabulary = self.settings.text_config.vocab_size
        reserved = range(vocabulary - RESERVED, vocabulary)
        seen = np.append(heard.ids, np.full(PREFIX, self.config.tts_pad_token_id))
        about = {name: value for name, value in self.media_shapes(heard.items).items() if value is not None}
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            limits = {"top_k": sampling.top_k, "top_p": sampling.top_p}
            drawn = {"do_sample": True, "temperature": sampling.temperature, **limits}
        with seeded(sampling), self.sound_told():
            result = self.talker.generate(
                inputs_embeds=embeddings,
                attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.int64, device=device),
                talker_input_ids=torch.from_numpy(seen).long()[None].to(device),
                trailing_text_hidden=told[None, begin:-1],
                tts_pad_embed=told[None, -1:],
                max_new_tokens=options.get("max_frames") or MOST_FRAMES,
                eos_token_id=self.settings.codec_eos_token_id,
                suppress_tokens=[id for id in reserved if id != self.settings.codec_eos_token_id],
                repetition_penalty=REPETITION_PENALTY,
                output_hidden_states=True,
                return_dict_in_generate=True,
                **about,
                **drawn,
            )
        frames = [step[-1] for step in result.hidden_states if step[-1] is not None]
        none = torch.empty(0, self.codebooks, dtype=torch.int64, device=device)
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

    def render(self, targets: torch.Tensor) -> Any:
        """Samples at `RATE`."""
        if not len(targets):
            return np.zeros(0, np.float32)
        wave = self.model.code2wav.chunked_decode(targets.T[None], chunk_size=300, left_context_size=25)
        return wave[0, 0].float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        return write_sound(item, RATE, stem)


def packed(starts: torch.Tensor, longest: int) -> dict[str, Any]:
    """What tells attention where sequences begin."""
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    return {"use_cache": False, **lengths}


@contextmanager
def seeded(sampling: Sampling) -> Iterator[None]:
    """transformers draws from torch's own stream of random numbers: there it begins where `sampling` is."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Passing `repetition_penalty`")  # only codes are repeated
        if sampling.generator is not None:
            device = sampling.generator.device
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=sampling.generator, device=device)))
        yield
