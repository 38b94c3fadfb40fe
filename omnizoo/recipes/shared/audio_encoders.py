"""Encoders for audio with towers of the Whisper type. Such towers accept only full windows of 30 s."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, WhisperFeatureExtractor

from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.recipes.shared.encoders import AudioTowerEncoder, load_processor

TOWER, PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
STRIDE = 2  # stride of the convolutions before the layers of a Whisper tower


class MaskedWindowEncoder(AudioTowerEncoder):
    """Encoder that splits audio into log-mel windows of the fixed length that the tower accepts.

    Windows do not attend to each other. Qwen2-Audio accepts a single window per clip. Padding within a window is masked
    in the tower and gets no placeholder tokens.
    """

    max_windows: ClassVar[int] = 1  # maximum number of windows of an audio clip
    merge: int = 2  # positions that are merged into one placeholder token

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float | None = None) -> None:
        super().__init__(model, TOWER, PROJECTOR)
        # The tower processes a batch of windows, with attention within each window, so packed attention is not needed.
        self.tower.config._attn_implementation = "sdpa"
        audio = model.config.audio_config
        self.extractor = load_processor(WhisperFeatureExtractor, folder, {}, feature_size=audio.num_mel_bins)
        self.positions: int = audio.max_source_positions
        self.samples: int = self.positions * STRIDE * self.extractor.hop_length  # samples of a window
        limit = self.max_windows * self.samples / self.rate
        self.max_seconds = min(max_seconds or limit, limit)

    def size_of(self, windows: int, placeholders: int) -> MediaSize:
        """Return the size of audio with this number of windows and placeholder tokens."""
        tower, per_placeholder = self.work
        return MediaSize(placeholders, cost=windows * tower.flops(self.positions) + placeholders * per_placeholder)

    def frames_of(self, samples: int) -> list[int]:
        """Return the number of mel frames in each window, without padding."""
        full, rest = divmod(samples, self.samples)
        frames = [self.positions * STRIDE] * full
        if rest:
            frames.append(-(-rest // self.extractor.hop_length))
        return frames

    def audio_positions(self, frames: int) -> int:
        """Return the number of positions in a window that are not padding."""
        return (frames - 1) // STRIDE + 1

    def placeholders_of(self, frames: Sequence[int]) -> int:
        """Return the number of placeholder tokens for the number of mel frames in each window."""
        return sum(self.audio_positions(count) // self.merge for count in frames)

    def measure(self, media: Media) -> MediaSize:
        samples = self.num_samples(media)
        frames = self.frames_of(samples)
        placeholders = self.placeholders_of(frames)
        if not placeholders:
            raise BadMedia(
                f"{media.name}: the audio of {samples / self.rate:.3f} s is too short for a placeholder token"
            )
        return self.size_of(len(frames), placeholders)

    def prepare(self, media: Media) -> Inputs:
        samples = self.read_samples(media)
        windows = [samples[start : start + self.samples] for start in range(0, len(samples), self.samples)]
        out = self.extractor(
            windows, sampling_rate=self.rate, padding="max_length", max_length=self.samples, return_tensors="pt"
        )
        return self.windows(out["input_features"], self.frames_of(len(samples))[-1])

    def windows(self, mels: torch.Tensor, frames: int) -> Inputs:
        """Return the inputs for `mels [windows, bins, frames]`.

        `frames` is the number of frames in the last window that are not padding. It is stored as the length of a
        tensor, so that reading it needs no host sync.
        """
        return {"mels": mels, "frames": torch.arange(frames, dtype=torch.int32)}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split audio into windows. Windows without placeholder tokens are dropped."""
        parts = []
        for mels, frames in zip(inputs["mels"], self.frames_in(inputs), strict=True):
            window = self.windows(mels[None].clone(), frames)
            placeholders = self.count_placeholders(window)
            if placeholders:
                parts.append((self.size_of(1, placeholders), window))
        return parts

    def dummy_input(self) -> Inputs:
        frames = self.frames_of(2 * STRIDE * self.extractor.hop_length)[0]
        return self.windows(torch.zeros(1, self.extractor.feature_size, self.positions * STRIDE), frames)

    def frames_in(self, inputs: Inputs) -> list[int]:
        """Return the number of mel frames in each window of a prepared item, without padding."""
        num_full = len(inputs["mels"]) - 1
        return [self.positions * STRIDE] * num_full + [len(inputs["frames"])]

    def count_placeholders(self, inputs: Inputs) -> int:
        return self.placeholders_of(self.frames_in(inputs))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        mels = torch.cat([item["mels"] for item in items])
        frames = [count for item in items for count in self.frames_in(item)]
        features = self.run_tower(mels, frames)
        unpadded = []
        for window, count in zip(features, frames, strict=True):
            unpadded.append(window[: self.audio_positions(count) // self.merge])
        projected: torch.Tensor = self.projector(torch.cat(unpadded))
        return projected

    def run_tower(self, mels: torch.Tensor, frames: Sequence[int]) -> Any:
        """Return the tower's features, `[windows, positions, width]`. Some towers merge neighboring positions first."""
        positions = torch.arange(self.positions, device=mels.device)
        is_audio = torch.stack([positions < self.audio_positions(count) for count in frames])
        mask = is_audio[:, None, None].expand(-1, 1, self.positions, -1)
        return self.tower(mels, attention_mask=mask, return_dict=True).last_hidden_state


class MultiWindowEncoder(MaskedWindowEncoder):
    """Encoder of Audio Flamingo 3, with up to 20 consecutive windows."""

    max_windows = 20

    def run_tower(self, mels: torch.Tensor, frames: Sequence[int]) -> Any:
        frame_numbers = torch.arange(mels.shape[2], device=mels.device)
        mask = torch.stack([frame_numbers < count for count in frames])
        return self.tower(mels, input_features_mask=mask, return_dict=True).last_hidden_state


class FullWindowEncoder(MaskedWindowEncoder):
    """Encoder of Voxtral. Padding also gets placeholder tokens, as in the training of the model."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 1800.0) -> None:
        super().__init__(model, folder)
        self.max_seconds = max_seconds
        audio = model.config.audio_config
        self.merge = audio.intermediate_size // audio.hidden_size

    def frames_of(self, samples: int) -> list[int]:
        return [self.positions * STRIDE] * -(-samples // self.samples)

    def prepare(self, media: Media) -> Inputs:
        samples = self.read_samples(media)
        out = self.extractor(
            samples,
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.samples,
            return_tensors="pt",
        )
        frames = self.positions * STRIDE
        mels = out["input_features"][0].unflatten(1, (-1, frames)).transpose(0, 1).contiguous()
        return self.windows(mels, frames)

    def run_tower(self, mels: torch.Tensor, frames: Sequence[int]) -> Any:
        out = self.tower(mels, return_dict=True).last_hidden_state
        return out.unflatten(1, (-1, self.merge)).flatten(2)
