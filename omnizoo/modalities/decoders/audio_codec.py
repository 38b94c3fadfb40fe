"""Audio as codes: a frozen neural codec gives several codebook indices per frame, predicted with the delay pattern.

Codebook k is delayed by k positions, so that no code depends on another code of the same position:

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
from omnizoo.modalities.files.decoding import SOUND_OPTIONS
from omnizoo.modalities.files.preview import audio_player
from omnizoo.modalities.flop_count import causal_pairs
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.ops.loss.linear_cross_entropy import CHUNK, LinearHead, linear_cross_entropy_sum
from omnizoo.ops.loss.log_probability import by_rows, log_probabilities


class AudioCodec(LikelihoodDecoder, Decoder):
    """Decoder for audio, with any mono codec that `AutoModel` of transformers builds.

    Args:
        width: Width of the foundation.
        config: Config of the codec.
        folder: Unused: the weights of the codec are loaded through `pretrained`.
        codebooks: Number of codebooks to use, coarsest first. Defaults to all codebooks of the codec.
        max_seconds: Longest audio that is accepted or generated, in seconds.
    """

    item_options = SOUND_OPTIONS

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
            raise UserError("decoder: a codec needs `path` (a Hugging Face folder) or `config`")
        self.codec = Codec(config)
        self.codebooks = codebooks or self.codec.codebooks
        if not 0 < self.codebooks <= self.codec.codebooks:
            raise UserError(f"decoder.codebooks: {codebooks}: the codec has 1 to {self.codec.codebooks}")
        self.sample_rate = self.codec.sample_rate
        self.max_frames = math.ceil(max_seconds * self.sample_rate / self.codec.hop)
        self.max_seconds = max_seconds
        self.stop = self.codec.codes  # code of codebook 0 that ends the audio
        self.none = self.codec.codes + 1
        self.table = nn.Embedding(self.codebooks * (self.none + 1), width)
        self.head = nn.Linear(width, self.codebooks * self.codec.codes + 1)  # codebook 0 has one more logit: stop
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table.weight, std=0.02)  # typical scale of language model embeddings

    @property
    def config(self) -> PreTrainedConfig:
        config: PreTrainedConfig = self.codec.model.config
        return config

    @property
    def pretrained(self) -> PreTrainedModel | None:
        model: PreTrainedModel = self.codec.model
        return model

    def measure(self, media: Media) -> MediaSize:
        frames = math.ceil(audio_length(media, self.sample_rate, self.max_seconds) / self.codec.hop)
        places = frames + max(self.codebooks - 1, 1)
        return MediaSize(places, cost=self.codec.work.flops(frames), targets=frames * self.codebooks + 1)

    def prepare(self, media: Media) -> Inputs:
        """Return whole frames of int16 samples. Floats would be cast to the precision of the run."""
        wave = read_audio(media, self.sample_rate, self.max_seconds)
        wave = np.pad(wave.clip(-1, 1), (0, -len(wave) % self.codec.hop))
        return {"wave": torch.from_numpy((wave * 32767).round().astype(np.int16))}

    def dummy_input(self) -> Inputs:
        return {"wave": torch.zeros(self.codec.hop, dtype=torch.int16)}

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        codes = [self.codec.encode(item["wave"] / 32767)[: self.codebooks] for item in items]
        return torch.cat([delay(c, self.stop, self.none) for c in codes])

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        first = torch.arange(self.codebooks, device=targets.device) * (self.none + 1)
        embedded: torch.Tensor = self.table(targets + first).sum(1)
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if type(self.head) is nn.Linear and len(hidden) * self.head.out_features > CHUNK:
            return self._chunked_loss(hidden, targets)
        coarse, fine = self._logits(hidden)
        loss = code_loss(coarse, targets[:, 0], ignore=self.none)
        return loss + code_loss(fine.flatten(0, 1), targets[:, 1:].flatten(), ignore=self.none)

    def _chunked_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss one codebook, and one chunk of its logits, at a time."""
        sizes = [self.stop + 1, *[self.stop] * (self.codebooks - 1)]
        parts = zip(self.head.weight.split(sizes), self.head.bias.split(sizes), targets.unbind(1), strict=True)
        losses = []
        for weight, bias, codes in parts:
            counts = codes != self.none
            head = LinearHead(weight, bias)
            losses.append(linear_cross_entropy_sum(hidden, head, codes.where(counts, 0), counts.to(hidden.dtype)))
        return torch.stack(losses).sum()

    def log_likelihood(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-likelihood of each target, summed over codebooks, and the number of codes in it."""

        def work(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            coarse, fine = self._logits(some)
            finer = log_probabilities(fine.flatten(0, 1), wanted[:, 1:].flatten(), self.none)
            return log_probabilities(coarse, wanted[:, 0], self.none) + finer.view(len(some), self.codebooks - 1).sum(1)

        each = by_rows(work, hidden, targets, max(1, CHUNK // (self.codebooks * self.stop + 1)))
        return each, (targets != self.none).sum(1).to(each.dtype)

    def _logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of codebook 0 `[N, V + 1]`, the last one for stop, and of the others `[N, K - 1, V]`."""
        coarse, fine = self.head(hidden).split([self.stop + 1, (self.codebooks - 1) * self.stop], -1)
        return coarse, fine.unflatten(-1, (self.codebooks - 1, self.stop))

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        place, frames = len(targets), _frames_before_stop(targets, self.stop)
        if frames is not None and place == frames + max(self.codebooks - 1, 1):
            return None
        coarse, fine = self._logits(hidden[None])
        if place == 0:  # audio has at least one frame
            coarse = coarse[:, : self.stop]
        codes = torch.cat([sampling.draw(coarse), sampling.draw(fine[0])])
        if frames is not None:
            codes[0] = self.none
        elif place == self.max_frames:
            codes[0] = self.stop
        frame = place - torch.arange(self.codebooks, device=codes.device)
        late = (frame < 0) | (frame >= (place + 1 if frames is None else frames))
        late[0] = False
        return codes.masked_fill(late, self.none)

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
    """Convert codes `[K, T]` to targets `[T + max(K - 1, 1), K]`. A single codebook also needs a position for stop."""
    books, frames = codes.shape
    targets = codes.new_full((frames + max(books - 1, 1), books), none)
    for k in range(books):
        targets[k : k + frames, k] = codes[k]
    targets[frames, 0] = stop
    return targets


def undelay(targets: torch.Tensor, stop: int) -> torch.Tensor:
    """Convert targets `[n, K]` to codes `[K, T]`, the inverse of `delay`."""
    frames = _frames_before_stop(targets, stop)
    assert frames is not None
    return torch.stack([targets[k : k + frames, k] for k in range(targets.shape[1])])


def _frames_before_stop(targets: torch.Tensor, stop: int) -> int | None:
    stops = (targets[:, 0] == stop).nonzero()
    return int(stops[0]) if len(stops) else None


class Codec(Frozen):
    """A codec of transformers, between waveforms of whole frames `[T * hop]` and codes `[codebooks, T]`."""

    def __init__(self, config: PreTrainedConfig) -> None:
        count = next((name for name in ("num_quantizers", "n_codebooks") if hasattr(config, name)), None)
        hop = next((name for name in ("hop_length", "frame_size") if hasattr(config, name)), None)
        if not (count and hop and hasattr(config, "codebook_size")):
            raise UserError(f"decoder.config: `{config.model_type}` is not a codec that makes codes of sound")
        if getattr(config, "chunk_length_s", None) or getattr(config, "normalize", False):
            raise UserError("decoder.config: a codec that normalises or chunks sound needs more than codes to decode")
        if getattr(config, "audio_channels", 1) != 1:
            raise UserError(f"decoder.config: audio_channels {config.audio_channels}: a mono codec was expected")
        super().__init__(AutoModel.from_config(config))
        self.codebooks, self.hop = int(getattr(config, count)), int(getattr(config, hop))
        self.codes, self.sample_rate = config.codebook_size, config.sampling_rate
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
                length, direction = module.get_parameter("original0"), module.get_parameter("original1")
                nn.init.kaiming_normal_(direction)
                with torch.no_grad():
                    length.copy_(torch.norm_except_dim(direction, 2, 0))

    @cached_property
    def work(self) -> "EncodeWork":
        return EncodeWork.of(self.model, self.hop)

    def encode(self, wave: torch.Tensor) -> torch.Tensor:
        rate = {}  # codecs with several bit rates use the lowest, with the fewest codebooks, by default
        if "bandwidth" in inspect.signature(self.model.encode).parameters:
            rate["bandwidth"] = max(self.model.config.target_bandwidths)
        codes: torch.Tensor = self.model.encode(wave.to(self.like)[None, None], **rate).audio_codes
        codes = codes.view(-1, codes.shape[-1])
        assert codes.shape[1] * self.hop == len(wave)
        return codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the waveform of the codes. With fewer codebooks than the codec has, the audio is coarser."""
        scaled = "audio_scales" in inspect.signature(self.model.decode).parameters
        out = self.model.decode(codes[None, None], [None]) if scaled else self.model.decode(audio_codes=codes[None])
        wave: torch.Tensor = out.audio_values
        return wave.flatten()


@dataclass(frozen=True)
class EncodeWork:
    """FLOPs of converting audio to codes."""

    per_frame: float  # FLOPs per frame, without attention
    positions: float  # attention positions per frame; 0 without attention
    config: PreTrainedConfig

    @classmethod
    def of(cls, codec: PreTrainedModel, hop: int) -> "EncodeWork":
        """Count the FLOPs from the modules of a codec with `hop` samples per frame."""
        flops, positions = 0.0, 0.0
        values = float(hop)  # values per frame; each strided convolution reduces their number
        for name, module in codec.named_modules():
            if name.startswith(("decoder", "upsample")) or name.endswith("output_proj"):  # codes to audio: not run
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
            flops += sum(2 * book.numel() for key, book in module.named_buffers(recurse=False) if key == "embed")
        return cls(flops, positions, codec.config)

    def flops(self, frames: int) -> float:
        """Return the FLOPs for `frames` frames. Attention is causal, within a window if the config has one."""
        flops = frames * self.per_frame
        if self.positions:
            pairs = causal_pairs(math.ceil(frames * self.positions), getattr(self.config, "sliding_window", None))
            flops += 4 * self.config.num_hidden_layers * self.config.hidden_size * pairs
        return flops
