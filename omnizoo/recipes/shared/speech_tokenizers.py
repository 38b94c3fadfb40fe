"""Decoders for speech as codes of the model's own codec, one frame per token.

The head of the language model predicts the first codebook. A small model, the depth decoder, predicts the others in
sequence.

Such a decoder has no weights, but calls the model that it was built for. The codec in the model is frozen, computes in
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
from omnizoo.modalities.decoders.audio_codec import EncodeFlops
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.decoders.precomputed_speech import is_codes, read_codes
from omnizoo.modalities.files.audio import audio_length, read_audio, write_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS
from omnizoo.modalities.files.preview import audio_player
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.models.hf_private import text_embedding
from omnizoo.models.media.features import Features
from omnizoo.recipes.shared.decoders import generate_arguments, head_loss, seeded
from omnizoo.recipes.shared.encoders import UsesModel, merge_features


class DepthCodes(UsesModel, MultiLossDecoder, HeadDecoder, ItemDecoder, CustomFlops, Decoder):
    """Decoder for audio as frames of codes. A last frame with only end codes marks the end.

    Args:
        max_seconds: Maximum length of an audio clip.
        residual_weight: Weight of the loss of the depth decoder.
        residual_frames: Fraction of frames that the depth decoder is trained on, sampled for each audio clip. The last
            frame is always included.
    """

    item_options = AUDIO_OPTIONS
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
            raise UserError(
                f"model.modalities: residual_frames is {residual_frames}; "
                "expected a number greater than 0 and at most 1"
            )
        self.max_seconds = max_seconds
        self.residual_frames = residual_frames
        self.term_weights = {"": 1.0, "residual": residual_weight}
        codec_config = self.codec.config
        self.codebooks = model.config.num_codebooks
        self.end = model.config.codebook_eos_token_id
        self.rate = codec_config.sampling_rate
        self.hop = codec_config.frame_size
        self.sizes = [codec_config.codebook_size] * self.codebooks
        if codec_config.num_quantizers != self.codebooks:
            raise UserError(
                f"model.config: num_codebooks is {self.codebooks}, but its codec has {codec_config.num_quantizers}. "
                "Use equal numbers."
            )
        for module in (*self.codec.modules(), *self.depth.modules()):
            if isinstance(module, PreTrainedModel):  # no packing: a sequence is one clip or frame
                module.config._attn_implementation = "sdpa"

    @property
    def codec(self) -> Any:
        """The codec, always in eval mode."""
        return self.model.codec_model.eval()

    @property
    def depth(self) -> Any:
        """The depth decoder. It predicts all codebooks except the first."""
        return self.model.depth_decoder

    @property
    def head(self) -> Any:
        """The head of the language model. It predicts the first codebook."""
        return self.model.get_output_embeddings()

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        """Yield the modules that `method` runs.

        The depth decoder runs once per codebook. Attention between the codes of a frame is not counted.
        """
        if method == "loss":
            inner, *heads = self.depth.children()
            yield self.head
            yield from [inner] * max(1, round(self.codebooks * self.residual_frames))
            yield from heads

    @cached_property
    def work(self) -> EncodeFlops:
        """FLOPs of the codec."""
        return EncodeFlops.of(self.codec, self.hop)

    def measure(self, media: Media) -> MediaSize:
        if is_codes(media):
            frames = len(self.codes_of(media))
            cost = 0.0
        else:
            frames = math.ceil(audio_length(media, self.rate, self.max_seconds) / self.hop)
            cost = self.work.flops(frames)
        refined_frames = frames - self.left_out(frames) + 1
        return MediaSize(frames + 1, cost, num_residual_targets=refined_frames * (self.codebooks - 1))

    def codes_of(self, media: Media) -> Any:
        """Return the codes `[frames, codebooks]` of an item that consists of codes."""
        max_frames = math.ceil(self.max_seconds * self.rate / self.hop)
        return read_codes(media, self.sizes, max_frames, None, self.rate)

    def left_out(self, frames: int) -> int:
        """Return the number of frames that the depth decoder is not trained on.

        The number is rounded as in transformers' processor.
        """
        return int(frames * (1 - self.residual_frames))

    def prepare(self, media: Media) -> Inputs:
        if is_codes(media):
            codes = torch.from_numpy(self.codes_of(media))
            return {"codes": codes, "refined": self.refined(media, len(codes))}
        wave = read_audio(media, self.rate, self.max_seconds)
        frames = math.ceil(len(wave) / self.hop)
        return {"wave": torch.from_numpy(wave), "refined": self.refined(media, frames)}

    def refined(self, media: Media, frames: int) -> torch.Tensor:
        """Return a 0/1 mask `[frames + 1]` of the frames, including the end, that the depth decoder is trained on."""
        is_refined = torch.ones(frames + 1, dtype=torch.int64)
        random = np.random.Generator(np.random.PCG64(media.seed))
        is_refined[random.permutation(frames)[: self.left_out(frames)]] = 0
        return is_refined

    def dummy_input(self) -> Inputs:
        codes = torch.zeros(1, self.codebooks, dtype=torch.int64)
        return {"codes": codes, "refined": torch.ones(2, dtype=torch.int64)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Return `[n, codebooks + 1]`: the codes of each frame, and whether the depth decoder trains on the frame."""
        targets = []
        for item in items:
            is_refined = item["refined"][:, None]
            targets.append(torch.cat([self.frames_of(item), is_refined], 1))
        return torch.cat(targets)

    def frames_of(self, item: Inputs) -> torch.Tensor:
        """Return the codes of a prepared item, followed by the frame of end codes."""
        codes = item["codes"] if "codes" in item else self.look_up(item["wave"])
        last_frame = codes.new_full((1, self.codebooks), self.end)
        return torch.cat([codes, last_frame])

    def look_up(self, wave: torch.Tensor) -> torch.Tensor:
        """Return the codes `[frames, codebooks]` of audio samples."""
        codec = self.codec
        weight = next(codec.parameters())
        codes: torch.Tensor = codec.encode(wave.to(weight.dtype)[None, None]).audio_codes[0].T
        return codes

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(targets[None, :, : self.codebooks])[0]
        return embedded

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        codes = targets[:, : self.codebooks]
        first = head_loss(self.head, hidden, codes[:, 0])
        if self.residual_frames == 1:
            return {"": first, "residual": self.residual_loss(hidden, codes)}
        refined_frames = targets[:, self.codebooks].nonzero().squeeze(1)
        residual = self.residual_loss(hidden.index_select(0, refined_frames), codes.index_select(0, refined_frames))
        if not len(refined_frames):  # no frame has a loss, but the result of the dummy frame stays in the graph
            return {"": first, "residual": residual.sum() + first.new_zeros(len(first))}
        return {"": first, "residual": residual.new_zeros(len(first)).index_add(0, refined_frames, residual)}

    def residual_loss(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the loss of the depth decoder on each frame, or 0 without frames.

        Each frame is one sequence. It consists of the hidden state that predicts the frame, and the codes of the frame.
        Each position predicts the code of the next codebook. Without frames, the depth decoder runs on a dummy frame.
        It may be sharded, so other ranks would otherwise wait in its collectives.
        """
        if not len(codes):
            dummy_hidden = hidden.sum(0, keepdim=True)
            dummy_codes = codes.new_zeros(1, self.codebooks)
            return 0 * self.residual_loss(dummy_hidden, dummy_codes).sum()
        ids = F.pad(codes[:, :-1], (1, 0))
        out = self.depth(input_ids=ids, backbone_last_hidden_state=hidden, use_cache=False)
        losses = code_loss(out.logits.flatten(0, 1), codes[:, 1:].flatten())
        return losses.view(len(codes), self.codebooks - 1).sum(1)

    @torch.no_grad()
    def generate_item(self, embeddings: torch.Tensor, max_targets: int, sampling: Sampling) -> torch.Tensor:
        """Generate codes with the model's own `generate`.

        Temperature, `top_k` and `top_p` apply to all codebooks.
        """
        no_codes = list(range(self.sizes[0], self.head.out_features))  # ids without a code in the codec
        arguments = generate_arguments(sampling) | {"suppress_tokens": no_codes or None}
        depth_arguments = {f"depth_decoder_{name}": value for name, value in arguments.items()}
        attention_mask = torch.ones(1, len(embeddings), dtype=torch.int64, device=embeddings.device)
        with seeded(sampling):
            targets: torch.Tensor = self.model.generate(
                inputs_embeds=embeddings[None],
                attention_mask=attention_mask,
                max_new_tokens=max_targets,
                **arguments,
                **depth_arguments,
            )[0]
        ends = (targets == self.end).all(1).nonzero()
        return targets[: int(ends[0])] if len(ends) else targets

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


def merge_frame_embeddings(
    model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]
) -> dict[str, Any]:
    """Insert the embeddings of frames between the text embeddings. Text has a separate embedding table."""
    embeddings = text_embedding(model)(inputs["input_ids"])
    return merge_features(model, inputs | {"inputs_embeds": embeddings}, features)
