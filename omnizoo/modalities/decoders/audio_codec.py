"""Audio as codes. A frozen neural codec produces several codes per frame. They are predicted in a delay pattern.

Codebook k is delayed by k positions, so that no code depends on another code at the same position:

    position    0    1    2    3    4        K = 3 codebooks, T = 3 frames: T + K - 1 positions
    codebook 0  a0   a1   a2  stop   .       stop: end of the audio, learned as an additional code
    codebook 1   .   b0   b1   b2    .       . : no target
    codebook 2   .    .   c0   c1   c2
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Decoder, LikelihoodDecoder
from omnizoo.modalities.decoders.image_tokens import code_loss
from omnizoo.modalities.files.audio import audio_length, read_audio, write_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS
from omnizoo.modalities.files.preview import audio_player
from omnizoo.modalities.flop_count import causal_pairs
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.ops.loss.linear_cross_entropy import CHUNK, LinearHead, linear_cross_entropy
from omnizoo.ops.loss.log_probability import by_rows, log_probabilities


class AudioCodec(LikelihoodDecoder, Decoder):
    """Decoder for audio. It works with any mono codec that transformers' `AutoModel` can build.

    Args:
        width: Width of the foundation.
        config: Config of the codec.
        folder: Not used, because the weights of the codec are loaded through `pretrained`.
        codebooks: Number of codebooks to use, coarsest first. Defaults to all codebooks of the codec.
        max_seconds: Longest audio that is accepted or generated, in seconds.
    """

    item_options = AUDIO_OPTIONS

    def __init__(
        self,
        width: int,
        config: PreTrainedConfig | None = None,
        folder: str | None = None,
        codebooks: int | None = None,
        max_seconds: float = 30.0,
    ) -> None:
        super().__init__()
        if config is None:
            raise UserError("decoder: audio_codec needs `path` or `config`. Set one to a Hugging Face codec.")
        self.codec = Codec(config)
        self.codebooks = codebooks or self.codec.codebooks
        if not 0 < self.codebooks <= self.codec.codebooks:
            raise UserError(f"decoder.codebooks: {codebooks} is not a number from 1 to {self.codec.codebooks}")
        self.sample_rate = self.codec.sample_rate
        self.max_frames = math.ceil(max_seconds * self.sample_rate / self.codec.hop)
        self.max_seconds = max_seconds
        self.stop = self.codec.codes  # code of codebook 0 that ends the audio
        self.none = self.codec.codes + 1
        self.table = nn.Embedding(self.codebooks * (self.none + 1), width)
        self.head = nn.Linear(width, self.codebooks * self.codec.codes + 1)  # codebook 0 has a logit for stop
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table.weight, std=0.02)  # typical scale of language model embeddings

    @property
    def config(self) -> PreTrainedConfig:
        """The config of the codec."""
        config: PreTrainedConfig = self.codec.model.config
        return config

    @property
    def pretrained(self) -> PreTrainedModel | None:
        model: PreTrainedModel = self.codec.model
        return model

    def measure(self, media: Media) -> MediaSize:
        num_samples = audio_length(media, self.sample_rate, self.max_seconds)
        frames = math.ceil(num_samples / self.codec.hop)
        num_placeholders = frames + max(self.codebooks - 1, 1)
        return MediaSize(num_placeholders, cost=self.codec.work.flops(frames), targets=frames * self.codebooks + 1)

    def prepare(self, media: Media) -> Inputs:
        """Return int16 samples, padded to complete frames. Float samples would be rounded to the run's precision."""
        wave = read_audio(media, self.sample_rate, self.max_seconds)
        wave = np.pad(wave.clip(-1, 1), (0, -len(wave) % self.codec.hop))
        return {"wave": torch.from_numpy((wave * 32767).round().astype(np.int16))}

    def dummy_input(self) -> Inputs:
        return {"wave": torch.zeros(self.codec.hop, dtype=torch.int16)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        codes_by_item = [self.codec.encode(item["wave"] / 32767)[: self.codebooks] for item in items]
        return torch.cat([delay(codes, self.stop, self.none) for codes in codes_by_item])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        first_entry = torch.arange(self.codebooks, device=targets.device) * (self.none + 1)  # per codebook, in `table`
        embedded: torch.Tensor = self.table(targets + first_entry).sum(1)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if type(self.head) is nn.Linear and len(hidden) * self.head.out_features > CHUNK:
            return self._chunked_loss(hidden, targets)
        coarse, fine = self._logits(hidden)
        coarse_loss = code_loss(coarse, targets[:, 0], ignore=self.none)
        fine_loss = code_loss(fine.flatten(0, 1), targets[:, 1:].flatten(), ignore=self.none)
        return coarse_loss + fine_loss.view(len(targets), self.codebooks - 1).sum(1)

    def _chunked_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss for one codebook at a time, in chunks, so the logits of all targets are never in memory."""
        sizes = [self.stop + 1, *[self.stop] * (self.codebooks - 1)]
        weights = self.head.weight.split(sizes)
        biases = self.head.bias.split(sizes)
        losses = []
        for weight, bias, codes in zip(weights, biases, targets.unbind(1), strict=True):
            is_target = codes != self.none
            head = LinearHead(weight, bias)
            labels = codes.where(is_target, 0)
            losses.append(linear_cross_entropy(hidden, head, labels, is_target.to(hidden.dtype)))
        return torch.stack(losses).sum(0)

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-likelihood of each target, summed over codebooks, and the number of codes in it."""

        def chunk_likelihood(chunk_hidden: torch.Tensor, chunk_targets: torch.Tensor) -> torch.Tensor:
            coarse, fine = self._logits(chunk_hidden)
            by_fine_code = log_probabilities(fine.flatten(0, 1), chunk_targets[:, 1:].flatten(), self.none)
            fine_likelihood = by_fine_code.view(len(chunk_hidden), self.codebooks - 1).sum(1)
            return log_probabilities(coarse, chunk_targets[:, 0], self.none) + fine_likelihood

        rows_per_chunk = max(1, CHUNK // (self.codebooks * self.stop + 1))
        likelihood = by_rows(chunk_likelihood, hidden, targets, rows_per_chunk)
        num_codes = (targets != self.none).sum(1)
        return likelihood, num_codes.to(likelihood.dtype)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of codebook 0, `[N, codes + 1]`, and of the others, `[N, codebooks - 1, codes]`.

        The last logit of codebook 0 is for stop.
        """
        coarse, fine = self.head(hidden).split([self.stop + 1, (self.codebooks - 1) * self.stop], -1)
        return coarse, fine.unflatten(-1, (self.codebooks - 1, self.stop))

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        position = len(targets)
        frames = _frames_before_stop(targets, self.stop)
        if frames is not None and position == frames + max(self.codebooks - 1, 1):
            return None

        coarse, fine = self._logits(hidden[None])
        if position == 0:  # audio has at least one frame
            coarse = coarse[:, : self.stop]
        codes = torch.cat([sampling.draw(coarse), sampling.draw(fine[0])])
        if frames is not None:
            codes[0] = self.none
        elif position == self.max_frames:
            codes[0] = self.stop

        # The delay gives each codebook a different frame.
        frame = position - torch.arange(self.codebooks, device=codes.device)
        end = position + 1 if frames is None else frames
        is_outside = (frame < 0) | (frame >= end)
        is_outside[0] = False
        return codes.masked_fill(is_outside, self.none)

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the waveform at `sample_rate`."""
        return self.codec.decode(undelay(targets, self.stop)).float().cpu().numpy()

    def save(self, item: np.ndarray[Any, np.dtype[np.float32]], stem: str) -> str:
        return write_audio(item, self.sample_rate, stem)

    def preview(self, media: Media) -> str:
        samples = read_audio(media, self.sample_rate, self.max_seconds)
        return audio_player(samples, self.sample_rate, media.name)


def delay(codes: torch.Tensor, stop: int, none: int) -> torch.Tensor:
    """Convert the codes `[K, T]` of K codebooks and T frames to targets `[T + max(K - 1, 1), K]`.

    Even a single codebook needs a position for stop.
    """
    codebooks, frames = codes.shape
    targets = codes.new_full((frames + max(codebooks - 1, 1), codebooks), none)
    for k in range(codebooks):
        targets[k : k + frames, k] = codes[k]
    targets[frames, 0] = stop
    return targets


def undelay(targets: torch.Tensor, stop: int) -> torch.Tensor:
    """Convert targets `[n, K]` to codes `[K, T]`, the inverse of `delay`."""
    frames = _frames_before_stop(targets, stop)
    assert frames is not None
    return torch.stack([targets[k : k + frames, k] for k in range(targets.shape[1])])


def _frames_before_stop(targets: torch.Tensor, stop: int) -> int | None:
    """Return the number of frames before the stop code; None if there is no stop code yet."""
    stops = (targets[:, 0] == stop).nonzero()
    return int(stops[0]) if len(stops) else None


class Codec(Frozen):
    """A codec of transformers that converts between waveforms `[frames * hop]` and codes `[codebooks, frames]`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        count = next((name for name in ("num_quantizers", "n_codebooks") if hasattr(config, name)), None)
        hop = next((name for name in ("hop_length", "frame_size") if hasattr(config, name)), None)
        if not (count and hop and hasattr(config, "codebook_size")):
            raise UserError(f"decoder.config: `{config.model_type}` is not an audio codec. Use one that returns codes.")
        if getattr(config, "chunk_length_s", None) or getattr(config, "normalize", False):
            raise UserError(
                "decoder.config: codecs with `normalize` or `chunk_length_s` are not supported, "
                "because they need more than the codes to decode audio. Use another codec."
            )
        if getattr(config, "audio_channels", 1) != 1:
            raise UserError(f"decoder.config: audio_channels is {config.audio_channels}. Use a mono codec.")
        super().__init__(AutoModel.from_config(config))
        self.codebooks = int(getattr(config, count))
        self.hop = int(getattr(config, hop))
        self.codes = config.codebook_size
        self.sample_rate = config.sampling_rate
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize codebooks and weight-normalized weights at random, for codecs without pretrained weights.

        Codebooks of zeros would map all audio to one code. The initialization of transformers (5.22.2) skips weights
        under weight norm on the meta device.
        """
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name in ("embed", "embed_sum"):
                    nn.init.normal_(buffer)
            if isinstance(module, ParametrizationList):
                length = module.get_parameter("original0")
                direction = module.get_parameter("original1")
                nn.init.kaiming_normal_(direction)
                with torch.no_grad():
                    length.copy_(torch.norm_except_dim(direction, 2, 0))

    @cached_property
    def work(self) -> "EncodeFlops":
        """FLOPs of `encode`."""
        return EncodeFlops.of(self.model, self.hop)

    def encode(self, wave: torch.Tensor) -> torch.Tensor:
        options = {}
        if "bandwidth" in inspect.signature(self.model.encode).parameters:
            # By default, codecs with several bit rates use the lowest rate, with the fewest codebooks.
            options["bandwidth"] = max(self.model.config.target_bandwidths)
        codes: torch.Tensor = self.model.encode(wave.to(self.like)[None, None], **options).audio_codes
        codes = codes.view(-1, codes.shape[-1])
        assert codes.shape[1] * self.hop == len(wave)
        return codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the waveform of the codes. With fewer codebooks than the codec has, the audio is coarser."""
        takes_scales = "audio_scales" in inspect.signature(self.model.decode).parameters
        if takes_scales:
            output = self.model.decode(codes[None, None], [None])
        else:
            output = self.model.decode(audio_codes=codes[None])
        wave: torch.Tensor = output.audio_values
        return wave.flatten()


@dataclass(frozen=True)
class EncodeFlops:
    """FLOPs of converting audio to codes."""

    per_frame: float  # FLOPs per frame, without attention
    positions: float  # positions that attention processes per frame; 0 if the codec has no attention
    config: PreTrainedConfig

    @classmethod
    def of(cls, codec: PreTrainedModel, hop: int) -> "EncodeFlops":
        """Count the FLOPs from the modules of a codec with `hop` samples per frame."""
        flops = 0.0
        positions = 0.0
        values = float(hop)  # values per frame; each strided convolution reduces this number
        for name, module in codec.named_modules():
            if name.startswith(("decoder", "upsample")) or name.endswith("output_proj"):  # `encode` does not run these
                continue
            if isinstance(module, nn.Conv1d):
                values = max(1.0, values / module.stride[0])
                flops += 2 * values * module.weight.numel()
            elif isinstance(module, nn.Linear):
                flops += 2 * values * module.weight.numel()
                positions = values
            elif isinstance(module, nn.LSTM):
                flops += 2 * values * sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
            elif isinstance(module, nn.Embedding):  # distance to each code
                flops += 2 * module.weight.numel()
            for key, buffer in module.named_buffers(recurse=False):
                if key == "embed":  # codebook
                    flops += 2 * buffer.numel()
        return cls(flops, positions, codec.config)

    def flops(self, frames: int) -> float:
        """Return the FLOPs for `frames` frames. Attention is causal, within a window if the config has one."""
        flops = frames * self.per_frame
        if self.positions:
            pairs = causal_pairs(math.ceil(frames * self.positions), getattr(self.config, "sliding_window", None))
            flops += 4 * self.config.num_hidden_layers * self.config.hidden_size * pairs
        return flops
