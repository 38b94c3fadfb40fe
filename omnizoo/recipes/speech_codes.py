"""Speech that published models say as codes of their own codec, a frame in each place: the language model's head
predicts the first codebook, a small model (depth decoder) the others, one after the other.

A decoder here has no weights: it calls the model it was made for. The codec inside of the model is frozen, computes in
fp32 at least, and is given one sound at a time, as transformers does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, Inputs, Sampling, Size
from omnizoo.modalities.codec import EncodeWork, sound_html
from omnizoo.modalities.codes import code_loss
from omnizoo.modalities.files import SOUND_OPTIONS, read_sound, sound_length
from omnizoo.modalities.item import Media
from omnizoo.modalities.spoken import is_codes, read_codes, write_sound
from omnizoo.models.hf_private import text_embedding
from omnizoo.models.media_batch import Features
from omnizoo.ops.linear_cross_entropy import LinearHead, linear_cross_entropy_sum
from omnizoo.recipes.qwen_talker import seeded
from omnizoo.recipes.qwen_towers import put


class DepthCodes(Decoder):
    """A sound is its frames, and a last one of nothing but ends. `codec` and `depth` are modules of the model.

    `max_seconds`: the longest sound that is taken. `residual_weight`: of the loss of the depth decoder.
    `residual_frames`: the share of frames that it learns from, drawn anew for each sound; the end always counts.
    """

    item_options = SOUND_OPTIONS
    values = ("codes",)
    uses_head = True
    not_likely = "its codes are predicted by two models"

    def __init__(
        self,
        model: PreTrainedModel,
        codec: str,
        depth: str,
        max_seconds: float = 120.0,
        residual_weight: float = 1.0,
        residual_frames: float = 1.0,
    ) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        self.codec_name, self.depth_name = codec, depth
        if not 0 < residual_frames <= 1:
            raise UserError(f"model.modalities: residual_frames {residual_frames} is not above 0 and at most 1")
        self.max_seconds, self.residual_frames = max_seconds, residual_frames
        self.terms = {"": 1.0, "residual": residual_weight}
        settings, config = self.codec.config, model.config
        self.books, self.end = config.num_codebooks, config.codebook_eos_token_id
        self.rate, self.hop = settings.sampling_rate, settings.frame_size
        self.sizes = [settings.codebook_size] * self.books
        if (own := settings.num_quantizers) != self.books:
            raise UserError(f"model.config: num_codebooks {self.books}, and its codec has {own}; expected the same")
        for part in (*self.codec.modules(), *self.depth.modules()):
            if isinstance(part, PreTrainedModel):  # they see frames of one sound, or codes of one frame: no packs
                part.config._attn_implementation = "sdpa"

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def codec(self) -> Any:
        return self.model.get_submodule(self.codec_name).eval()

    @property
    def depth(self) -> Any:
        return self.model.get_submodule(self.depth_name)

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def runs(self, what: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        """The depth decoder runs once for each codebook; what its codes see of each other is not counted."""
        if what == "loss":
            inner, *heads = self.depth.children()
            yield self.head
            yield from [inner] * max(1, round(self.books * self.residual_frames))
            yield from heads

    @cached_property
    def work(self) -> EncodeWork:
        return EncodeWork.of(self.codec, self.hop)

    def measure(self, media: Media) -> Size:
        if is_codes(media):
            frames, cost = len(self.codes_of(media)), 0.0
        else:
            frames = math.ceil(sound_length(media, self.rate, self.max_seconds) / self.hop)
            cost = self.work.flops(frames)
        return Size(frames + 1, cost, residual=(frames - self.left_out(frames) + 1) * (self.books - 1))

    def codes_of(self, media: Media) -> Any:
        return read_codes(media, self.sizes, math.ceil(self.max_seconds * self.rate / self.hop), None, self.rate)

    def left_out(self, frames: int) -> int:
        """How many the depth decoder does not learn from: rounded as transformers' processor does."""
        return int(frames * (1 - self.residual_frames))

    def prepare(self, media: Media) -> Inputs:
        if is_codes(media):
            codes = torch.from_numpy(self.codes_of(media))
            return {"codes": codes, "refined": self.refined(media, len(codes))}
        wave = read_sound(media, self.rate, self.max_seconds)
        return {"wave": torch.from_numpy(wave), "refined": self.refined(media, math.ceil(len(wave) / self.hop))}

    def refined(self, media: Media, frames: int) -> torch.Tensor:
        """Which frames the depth decoder learns from, and the end."""
        chosen = torch.ones(frames + 1, dtype=torch.int64)
        dice = np.random.Generator(np.random.PCG64(media.seed))
        chosen[dice.permutation(frames)[: self.left_out(frames)]] = 0
        return chosen

    def blank(self) -> Inputs:
        codes = torch.zeros(1, self.books, dtype=torch.int64)
        return {"codes": codes, "refined": torch.ones(2, dtype=torch.int64)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        """`[n, K + 1]`: the codes of a frame, and whether the depth decoder learns from it."""
        return torch.cat([torch.cat([self.frames_of(item), item["refined"][:, None]], 1) for item in items])

    def frames_of(self, item: Inputs) -> torch.Tensor:
        codes = item["codes"] if "codes" in item else self.look_up(item["wave"])
        return torch.cat([codes, codes.new_full((1, self.books), self.end)])

    def look_up(self, wave: torch.Tensor) -> torch.Tensor:
        codec = self.codec
        weight = next(codec.parameters())
        codes: torch.Tensor = codec.encode(wave.to(weight.dtype)[None, None]).audio_codes[0].T
        return codes

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(targets[None, :, : self.books])[0]
        return embedded

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, head = targets[:, : self.books], self.head
        own = type(head).forward  # not what somebody may have put in its place
        if own is nn.Linear.forward:
            first = linear_cross_entropy_sum(hidden, LinearHead(head.weight, head.bias), codes[:, 0])
        else:
            first = code_loss(own(head, hidden), codes[:, 0])
        if self.residual_frames < 1:
            chosen = targets[:, self.books].nonzero().squeeze(1)
            hidden, codes = hidden.index_select(0, chosen), codes.index_select(0, chosen)
        return {"": first, "residual": self.residual_loss(hidden, codes)}

    def residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Each frame is a sequence: the hidden state that predicts it, then its codes; each place predicts the next
        codebook's. Without any frame, one is run all the same: its weights may be sharded, and others wait."""
        if not len(codes):
            return 0 * self.residual_loss(hidden.sum(0, keepdim=True), codes.new_zeros(1, self.books))
        ids = F.pad(codes[:, :-1], (1, 0))
        out = self.depth(input_ids=ids, backbone_last_hidden_state=hidden, use_cache=False)
        return code_loss(out.logits.flatten(0, 1), codes[:, 1:].flatten())

    @torch.no_grad()
    def speak(self, embeddings: torch.Tensor, most: int, sampling: Sampling) -> torch.Tensor:
        """By the model's own `generate`. Temperature and its kin hold for all codebooks."""
        no_codes = list(range(self.sizes[0], self.head.out_features))  # ids that the codec does not know
        drawn: dict[str, Any] = {"do_sample": sampling.temperature > 0, "suppress_tokens": no_codes or None}
        if drawn["do_sample"]:
            drawn |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        finer = {f"depth_decoder_{name}": value for name, value in drawn.items()}
        places = torch.ones(1, len(embeddings), dtype=torch.int64, device=embeddings.device)
        with seeded(sampling):
            made: torch.Tensor = self.model.generate(
                inputs_embeds=embeddings[None], attention_mask=places, max_new_tokens=most, **drawn, **finer
            )[0]
        ends = (made == self.end).all(1).nonzero()
        return made[: int(ends[0]) if len(ends) else None]

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        if not len(targets):
            return np.zeros(0, np.float32)
        return self.codec.decode(targets.T[None]).audio_values[0, 0].float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        return write_sound(item, self.rate, stem)

    def preview(self, media: Media) -> str:
        return super().preview(media) if is_codes(media) else sound_html(media, self.rate, self.max_seconds)


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Frames in the places of their placeholders, among text that has a table of its own."""
    embeddings = text_embedding(model)(inputs["input_ids"])
    for arrived in features.values():
        embeddings = put(embeddings, arrived.index, arrived.values)
    return inputs | {"input_ids": None, "inputs_embeds": embeddings}
