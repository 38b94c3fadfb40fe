"""Audio encoder that wraps any Whisper-type Hugging Face encoder. Such encoders accept log-mel windows of one length.

Audio is split into windows of this length. The last window is padded with silence, as in pretraining. Features of the
padding are dropped, so padding costs FLOPs in the tower, but no placeholder tokens in the pack.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.audio_utils import mel_filter_bank

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.base import Encoder
from omnizoo.modalities.encoders.projector import Grid, build_projector
from omnizoo.modalities.encoders.tower import TowerFlops, tower_skeleton
from omnizoo.modalities.files.audio import audio_length, read_audio
from omnizoo.modalities.files.decoding import AUDIO_OPTIONS
from omnizoo.modalities.files.preview import audio_player, thumbnail
from omnizoo.modalities.flop_count import is_trained, measured_flops
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.modalities.processor_files import processor_settings

FRAMES_PER_POSITION = 2  # stride of the convolutions before the layers of a Whisper-type encoder
TOP_FREQUENCY = 8000.0  # maximum frequency of the mel filters in Hz
PREVIEW_SECONDS = 3


class AudioEncoder(Encoder):
    """Encoder for audio.

    Args:
        width: Width of the foundation.
        config: Config of the tower, or of a model that contains it.
        folder: Model folder. Its preprocessor config provides the defaults of the spectrogram.
        projector: `kind` and options of the projector.
        max_seconds: Maximum length in seconds. Longer audio raises an error. A row can select a part with `start` and
            `end`.
        sample_rate: Sampling rate in Hz.
        hop_length: Distance between spectrogram frames, in samples.
        n_fft: Length of the Fourier transform, in samples.
    """

    item_options = AUDIO_OPTIONS

    def __init__(
        self,
        width: int,
        config: PretrainedConfig | None = None,
        folder: str | None = None,
        projector: dict[str, Any] | None = None,
        max_seconds: float = 300.0,
        sample_rate: int | None = None,
        hop_length: int | None = None,
        n_fft: int | None = None,
    ) -> None:
        super().__init__()
        skeleton = tower_skeleton(config, "audio")
        settings, _ = processor_settings(folder, "feature_extractor")
        self.sample_rate: int = sample_rate or settings.get("sampling_rate", 16000)
        self.hop: int = hop_length or settings.get("hop_length", 160)
        self.n_fft: int = n_fft or settings.get("n_fft", 400)
        self.max_seconds = max_seconds
        try:
            self.bins: int = skeleton.config.num_mel_bins
            self.frames: int = skeleton.config.max_source_positions * FRAMES_PER_POSITION
            probe = torch.zeros(1, self.bins, self.frames, device="meta")
            with torch.no_grad():
                self.positions, features = skeleton(input_features=probe).last_hidden_state.shape[1:]
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"encoder.config: {type(skeleton).__name__} does not accept log-mel windows of twice "
                f"max_source_positions frames, as Whisper encoders do: {first_line(error)}"
            ) from error
        if self.frames * self.hop <= self.n_fft // 2 or self.n_fft < 2:
            window = self.frames * self.hop
            raise UserError(f"encoder.n_fft: {self.n_fft} samples do not fit into a window of {window}")
        self.filters = mel_filter_bank(
            1 + self.n_fft // 2,
            self.bins,
            min_frequency=0.0,
            max_frequency=min(TOP_FREQUENCY, self.sample_rate / 2),
            sampling_rate=self.sample_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.measured = measured_flops(lambda: skeleton(input_features=probe).last_hidden_state)
        self.tower: PreTrainedModel = type(skeleton)(skeleton.config)
        self.projector = build_projector(projector, features, width, 1)

    @property
    def pretrained(self) -> PreTrainedModel:
        return self.tower

    @cached_property
    def work(self) -> TowerFlops:
        """FLOPs of the tower per window."""
        trained = is_trained(self.tower)
        return TowerFlops(trained, per_item=self.measured[trained])

    def measure(self, media: Media) -> MediaSize:
        num_samples = audio_length(media, self.sample_rate, self.max_seconds)
        grids: list[Grid] = [(positions,) for positions in self._positions_by_window(num_samples)]
        cost = sum(self.work.per_item + self.projector.flops(grid, self.work.trained) for grid in grids)
        num_placeholders = sum(self.projector.num_outputs(grid) for grid in grids)
        return MediaSize(num_placeholders, cost)

    def prepare(self, media: Media) -> Inputs:
        samples = read_audio(media, self.sample_rate, self.max_seconds)
        positions = self._positions_by_window(len(samples))
        num_windows = len(positions)
        padding = num_windows * self.frames * self.hop - len(samples)
        windows = torch.from_numpy(np.pad(samples, (0, padding))).view(num_windows, -1)
        return {"input_features": self._log_mel(windows), "positions": torch.tensor(positions)}

    def dummy_input(self) -> Inputs:
        return {"input_features": torch.zeros(1, self.bins, self.frames), "positions": torch.ones(1, dtype=torch.int64)}

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        mels = torch.cat([item["input_features"] for item in items])
        windows = self.tower(input_features=mels).last_hidden_state
        positions = torch.cat([item["positions"] for item in items]).tolist()
        features = torch.cat([window[:count] for window, count in zip(windows, positions, strict=True)])
        projected: torch.Tensor = self.projector(features, [(count,) for count in positions])
        return projected

    def preview(self, media: Media) -> str:
        samples = read_audio(media, self.sample_rate, self.max_seconds)
        title = f"{media.name}, {len(samples) / self.sample_rate:.1f} s"
        start = samples[: PREVIEW_SECONDS * self.sample_rate]
        return audio_player(start, self.sample_rate, title) + self._spectrogram(media)

    def _spectrogram(self, media: Media) -> str:
        """Return HTML that shows the input of the tower, without the silence at the end."""
        from PIL import Image  # an optional package, used by previews only

        inputs = self.prepare(media)
        mels = torch.cat(list(inputs["input_features"]), 1)
        num_positions = int(inputs["positions"].sum())
        num_frames = max(1, math.ceil(num_positions * self.frames / self.positions))
        audible = mels[:, :num_frames].flip(0)
        value_range = (audible.max() - audible.min()).clamp(min=1e-6)
        shade = ((audible - audible.min()) / value_range * 255).byte()
        return thumbnail(Image.fromarray(shade.numpy()), f"{self.bins} mel bins", 320)

    def _positions_by_window(self, samples: int) -> list[int]:
        """Return the number of positions with audio in each window."""
        window = self.frames * self.hop
        full, rest = divmod(samples, window)
        last = [max(1, math.ceil(rest * self.positions / window))] if rest else []
        return [self.positions] * full + last

    def _log_mel(self, windows: torch.Tensor) -> torch.Tensor:
        """Convert windows `[n, samples]` to log-mel features `[n, bins, frames]`.

        As in Whisper, values more than eight decades below the peak of their window are clipped.
        """
        spectrum = torch.stft(windows, self.n_fft, self.hop, window=torch.hann_window(self.n_fft), return_complex=True)
        mel = torch.from_numpy(self.filters).float().T @ spectrum[..., :-1].abs().square().contiguous()
        log = mel.clamp(min=1e-10).log10()
        return (log.maximum(log.amax((1, 2), keepdim=True) - 8) + 4) / 4
