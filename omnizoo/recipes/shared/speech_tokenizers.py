"""Decoders for speech as codes of the model's own codec, one frame per token.

The head of the language model predicts the first codebook. A small model, the depth decoder, predicts the others one
after the other.

Such a decoder has no weights: it calls the model that it was built for. The codec in the model is frozen, computes in
at least fp32, and processes one audio clip at a time, as in transformers.
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
from omnizoo.modalities.base import CustomFlops, Decoder, HeadDecoder, ItemDecoder, MultiLossDecoder
from omnizoo.modalities.decoders.audio_codec import EncodeWork
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.decoders.precomputed_speech import is_codes, read_codes
from omnizoo.modalities.files.audio import audio_length, read_audio, write_audio
from omnizoo.modalities.files.decoding import SOUND_OPTIONS
from omnizoo.modalities.files.preview import audio_player
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.hf_private import text_embedding
from omnizoo.models.media.features import Features
from omnizoo.recipes.shared.decoders import generate_arguments, head_loss, seeded
from omnizoo.recipes.shared.encoders import UsesModel, enter_features


class DepthCodes(UsesModel, MultiLossDecoder, HeadDecoder, ItemDecoder, CustomFlops, Decoder):
    """Decoder for audio frames, followed by a last frame that contains only end codes.

    Args:
        max_seconds: Maximum length of an audio clip.
        residual_weight: Weight of the loss of the depth decoder.
        residual_frames: Fraction of frames that the depth decoder is trained on, sampled for each audio clip. The last
            frame is always included.
    """

    item_options = SOUND_OPTIONS
    values = ("codes",)
    no_likelihood_reason = "its codes are predicted by two models"

    def __init__(
        self,
        model: PreTrainedModel,
        max_seconds: float = 120.0,
        residual_weight: float = 1.0,
        residual_frames: float = 1.0,
    ) -> None:
        super().__init__(model)
        if not 0 < residual_frames <= 1:
            raise UserError(f"model.modalities: residual_frames {residual_frames} is not above 0 and at most 1")
        self.max_seconds, self.residual_frames = max_seconds, residual_frames
        self.term_weights = {"": 1.0, "residual": residual_weight}
        settings, config = self.codec.config, model.config
        self.books, self.end = config.num_codebooks, config.codebook_eos_token_id
        self.rate, self.hop = settings.sampling_rate, settings.frame_size
        self.sizes = [settings.codebook_size] * self.books
        if (own := settings.num_quantizers) != self.books:
            raise UserError(f"model.config: num_codebooks {self.books}, and its codec has {own}; expected the same")
        for part in (*self.codec.modules(), *self.depth.modules()):
            if isinstance(part, PreTrainedModel):  # no packing: attention is within one audio clip, or one frame
                part.config._attn_implementation = "sdpa"

    @property
    def codec(self) -> Any:
        return self.model.codec_model.eval()

    @property
    def depth(self) -> Any:
        return self.model.depth_decoder

    @property
    def head(self) -> Any:
        return self.model.get_output_embeddings()

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        """Yield the modules that `method` runs.

        The depth decoder runs once per codebook. Attention between the codes of a frame is not counted.
        """
        if method == "loss":
            inner, *heads = self.depth.children()
            yield self.head
            yield from [inner] * max(1, round(self.books * self.residual_frames))
            yield from heads

    @cached_property
    def work(self) -> EncodeWork:
        return EncodeWork.of(self.codec, self.hop)

    def measure(self, media: Media) -> MediaSize:
        if is_codes(media):
            frames, cost = len(self.codes_of(media)), 0.0
        else:
            frames = math.ceil(audio_length(media, self.rate, self.max_seconds) / self.hop)
            cost = self.work.flops(frames)
        return MediaSize(frames + 1, cost, num_residual_targets=(frames - self.left_out(frames) + 1) * (self.books - 1))

    def codes_of(self, media: Media) -> Any:
        return read_codes(media, self.sizes, math.ceil(self.max_seconds * self.rate / self.hop), None, self.rate)

    def left_out(self, frames: int) -> int:
        """Return the number of frames that the depth decoder is not trained on.

        It is rounded as in transformers' processor.
        """
        return int(frames * (1 - self.residual_frames))

    def prepare(self, media: Media) -> Inputs:
        if is_codes(media):
            codes = torch.from_numpy(self.codes_of(media))
            return {"codes": codes, "refined": self.refined(media, len(codes))}
        wave = read_audio(media, self.rate, self.max_seconds)
        return {"wave": torch.from_numpy(wave), "refined": self.refined(media, math.ceil(len(wave) / self.hop))}

    def refined(self, media: Media, frames: int) -> torch.Tensor:
        """Return a 0/1 mask `[frames + 1]` of the frames, and the end, that the depth decoder is trained on."""
        chosen = torch.ones(frames + 1, dtype=torch.int64)
        dice = np.random.Generator(np.random.PCG64(media.seed))
        chosen[dice.permutation(frames)[: self.left_out(frames)]] = 0
        return chosen

    def dummy_input(self) -> Inputs:
        codes = torch.zeros(1, self.books, dtype=torch.int64)
        return {"codes": codes, "refined": torch.ones(2, dtype=torch.int64)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Return `[n, codebooks + 1]`: the codes of each frame, and whether the depth decoder is trained on it."""
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
        codes = targets[:, : self.books]
        first = head_loss(self.head, hidden, codes[:, 0])
        if self.residual_frames < 1:
            chosen = targets[:, self.books].nonzero().squeeze(1)
            hidden, codes = hidden.index_select(0, chosen), codes.index_select(0, chosen)
        return {"": first, "residual": self.residual_loss(hidden, codes)}

    def residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of the depth decoder.

        Each frame is one sequence: the hidden state that predicts it, then its codes. Each position predicts the code
        of the next codebook. Without frames, a dummy frame is run: the depth decoder may be sharded, and other ranks
        take part in its collectives.
        """
        if not len(codes):
            return 0 * self.residual_loss(hidden.sum(0, keepdim=True), codes.new_zeros(1, self.books))
        ids = F.pad(codes[:, :-1], (1, 0))
        out = self.depth(input_ids=ids, backbone_last_hidden_state=hidden, use_cache=False)
        return code_loss(out.logits.flatten(0, 1), codes[:, 1:].flatten())

    @torch.no_grad()
    def generate_item(self, embeddings: torch.Tensor, most: int, sampling: Sampling) -> torch.Tensor:
        """Generate codes with the model's own `generate`.

        Temperature, `top_k` and `top_p` apply to all codebooks.
        """
        no_codes = list(range(self.sizes[0], self.head.out_features))  # ids without a code in the codec
        arguments = generate_arguments(sampling) | {"suppress_tokens": no_codes or None}
        depth_arguments = {f"depth_decoder_{name}": value for name, value in arguments.items()}
        places = torch.ones(1, len(embeddings), dtype=torch.int64, device=embeddings.device)
        with seeded(sampling):
            made: torch.Tensor = self.model.generate(
                inputs_embeds=embeddings[None],
                attention_mask=places,
                max_new_tokens=most,
                **arguments,
                **depth_arguments,
            )[0]
        ends = (made == self.end).all(1).nonzero()
        return made[: int(ends[0]) if len(ends) else None]

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        if not len(targets):
            return np.zeros(0, np.float32)
        return self.codec.decode(targets.T[None]).audio_values[0, 0].float().cpu().numpy()

    def save(self, item: Any, stem: str) -> str:
        return write_audio(item, self.rate, stem)

    def preview(self, media: Media) -> str:
        if is_codes(media):
            return super().preview(media)
        return audio_player(read_audio(media, self.rate, self.max_seconds), self.rate, media.name)


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Insert the embeddings of frames among those of the text, which have a separate table."""
    embeddings = text_embedding(model)(inputs["input_ids"])
    return enter_features(model, inputs | {"inputs_embeds": embeddings}, features)
