"""Audio encoders of Qwen models, for audio clips and for the audio of videos. The latter is interleaved with frames."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

from omnizoo.modalities.base import Modality
from omnizoo.modalities.files.decoding import VIDEO_OPTIONS
from omnizoo.modalities.flop_count import FlopCounter
from omnizoo.modalities.item import Ids, Inputs, MediaItem, MediaSize, NestedRun
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.models.recipe import Options
from omnizoo.recipes.shared.encoders import AudioTowerEncoder, EncoderSpec, boundaries, build_modalities, load_processor
from omnizoo.recipes.shared.qwen_image import media_shapes, with_text_positions
from omnizoo.recipes.shared.qwen_video import AUDIO_IN_VIDEO, QwenVideoEncoder

WINDOWS_PER_PART = 4  # windows per part: longer audio is split, so that several ranks can encode it


class QwenAudioEncoder(AudioTowerEncoder):
    """Audio encoder of Qwen3-Omni: mel frames in chunks of one second, with 13 placeholder tokens each."""

    packs_items = True
    kind: ClassVar[Any] = WhisperFeatureExtractor
    published: ClassVar[Mapping[str, Any]] = {}
    extractor_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 300.0) -> None:
        super().__init__(model, "model.audio_tower")
        audio = model.config.audio_config
        self.chunk: int = 2 * audio.n_window
        self.extractor = load_processor(self.kind, folder, self.published, feature_size=audio.num_mel_bins)
        self.max_seconds = max_seconds

    def frames_of(self, samples: int) -> int:
        """Return the number of mel frames."""
        return samples // int(self.extractor.hop_length)

    def placeholders_of(self, frames: int) -> int:
        """Return the number of placeholder tokens, after three convolutions of stride 2 over each chunk."""
        return frames // self.chunk * -(-self.chunk // 8) - (-(frames % self.chunk) // 8)

    def measure(self, media: Media) -> MediaSize:
        samples = self.num_samples(media)
        if samples < self.extractor.n_fft:
            raise BadMedia(f"{media.name}: the audio of {samples / self.rate:.3f} s is too short for a mel frame")
        frames = self.frames_of(samples)
        placeholders = self.placeholders_of(frames)
        return MediaSize(placeholders, cost=self.flops(frames, placeholders), shape=(frames,))

    def flops(self, frames: int, placeholders: int) -> float:
        """Return the FLOPs of an audio clip.

        Convolutions run on full chunks, and attention on windows of several chunks.
        """
        per_chunk, per_placeholder, per_pair = self.unit_flops
        chunks = -(-frames // self.chunk)
        full_windows, rest = divmod(placeholders, self.window)
        pairs = full_windows * self.window**2 + rest**2
        return chunks * per_chunk + placeholders * per_placeholder + pairs * per_pair

    @property
    def window(self) -> int:
        """Number of placeholder tokens that attend to each other."""
        return -(-self.chunk // 8) * (self.window_frames // self.chunk)

    @property
    def window_frames(self) -> int:
        """Number of frames in an attention window."""
        return int(self.tower.n_window_infer)

    @cached_property
    def unit_flops(self) -> tuple[float, float, float]:
        """FLOPs per chunk, per placeholder token and per pair of placeholder tokens."""
        tower = self.tower
        bins = self.extractor.feature_size
        length = self.chunk
        chunk = FlopCounter()
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            bins = -(-bins // 2)
            length = -(-length // 2)
            chunk.multiply(convolution.weight, bins * length)
        chunk.run(tower.conv_out, length)
        placeholder = FlopCounter(chunk.trained)
        placeholder.run(tower.layers, 1)
        pair = FlopCounter(placeholder.trained)
        pair.attend(len(tower.layers), tower.config.d_model)
        for projector in self.projectors:
            placeholder.run(projector, 1)
        return chunk.flops, placeholder.flops, pair.flops

    @property
    def projectors(self) -> Sequence[nn.Module]:
        """Modules that run after the layers of the tower."""
        return (self.tower.proj1, self.tower.proj2)

    def prepare(self, media: Media) -> Inputs:
        return {"mels": self.mels(self.read_samples(media))}

    def mels(self, samples: npt.NDArray[np.float32]) -> torch.Tensor:
        """Return mel frames `[frames, bins]`."""
        options = {"padding": True, "truncation": False, "return_tensors": "pt", **self.extractor_options}
        mels: torch.Tensor = self.extractor(samples, sampling_rate=self.rate, **options)["input_features"][0].T
        return mels

    def chunks_of(self, mels: torch.Tensor) -> torch.Tensor:
        """Pad to full chunks and reshape: `[frames, bins]` -> `[chunks, frames per chunk, bins]`."""
        chunks: torch.Tensor = pad(mels, (0, 0, 0, -len(mels) % self.chunk)).unflatten(0, (-1, self.chunk))
        return chunks

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split audio at window boundaries, because positions attend only within their window."""
        parts: list[tuple[MediaSize, Inputs]] = []
        for mels in inputs["mels"].split(WINDOWS_PER_PART * self.window_frames):
            placeholders = self.count_placeholders({"mels": mels})
            part_size = replace(size, num_placeholders=placeholders, cost=self.flops(len(mels), placeholders))
            parts.append((part_size, {"mels": mels.clone()}))
        return parts

    def dummy_input(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return self.placeholders_of(len(inputs["mels"]))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode audio clips in chunks that are all padded to full length.

        The tower would pad to the longest chunk of a call, and the features of a short chunk depend on its padding.
        With full chunks, the features of an item do not depend on the batch.
        """
        placeholders = [self.count_placeholders(item) for item in items]
        padded = [self.chunks_of(item["mels"]) for item in items]
        device = padded[0].device
        # Only the last chunk of an item contains padded positions.
        lengths = [len(chunks) * -(-self.chunk // 8) for chunks in padded]
        out = self.tower(
            padded_feature=torch.cat(padded).transpose(1, 2),
            chunk_lengths=torch.empty(0),  # not used, because the arguments derived from it are passed instead
            valid_indices=first_rows(lengths, placeholders, device),
            cu_seqlens=boundaries([(count, self.window) for count in placeholders], device),
            max_seqlen=min(self.window, max(placeholders)),
            return_dict=True,
        )
        features: torch.Tensor = out.last_hidden_state
        return features


def first_rows(lengths: Sequence[int], counts: Sequence[int], device: torch.device, step: int = 1) -> torch.Tensor:
    """Return indices of rows in a concatenation of items: every `step`-th of the first `counts[i]` rows of item i.

    Item i has `lengths[i]` rows.
    """
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    rows = []
    for start, count in zip(starts, counts, strict=True):
        rows.append(torch.arange(start, start + count, step, device=device))
    return torch.cat(rows)


class PooledAudioEncoder(QwenAudioEncoder):
    """Audio encoder of Qwen2.5-Omni: mel frames in chunks of two seconds, with attention within each chunk.

    Two rows of a chunk become one placeholder token. Audio is limited to the extractor's `chunk_length`, because the
    model was not trained on longer audio.
    """

    published: ClassVar[Mapping[str, Any]] = {"chunk_length": 300}  # seconds

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float | None = None) -> None:
        super().__init__(model, folder)
        self.max_seconds = min(max_seconds or float("inf"), self.extractor.chunk_length)

    def frames_of(self, samples: int) -> int:
        return -(-samples // int(self.extractor.hop_length))

    def placeholders_of(self, frames: int) -> int:
        return ((frames - 1) // 2 + 1) // 2

    @property
    def window(self) -> int:
        return self.chunk // 4

    @property
    def window_frames(self) -> int:
        return 4 * self.chunk

    @cached_property
    def unit_flops(self) -> tuple[float, float, float]:
        """FLOPs per chunk, per placeholder token and per pair of placeholder tokens.

        A placeholder token has two rows, so a pair of tokens has four pairs of rows.
        """
        tower = self.tower
        chunk = FlopCounter()
        chunk.multiply(tower.conv1.weight, self.chunk)
        chunk.multiply(tower.conv2.weight, self.chunk // 2)
        placeholder = FlopCounter(chunk.trained)
        placeholder.run(tower.layers, 2)
        pair = FlopCounter(placeholder.trained)
        pair.attend(4 * len(tower.layers), tower.config.d_model)
        placeholder.run(tower.proj, 1)
        return chunk.flops, placeholder.flops, pair.flops

    def prepare(self, media: Media) -> Inputs:
        """Return the same mel frames as the model's processor.

        The processor pads with silence up to `chunk_length` and then removes the padding. Only the silence that the
        last FFT windows contain affects the result.
        """
        samples = self.read_samples(media)
        reach = self.extractor.n_fft + self.extractor.hop_length
        silence = max(0, min(reach, self.extractor.n_samples - len(samples)))
        mels = self.mels(np.pad(samples, (0, silence)))
        return self.with_chunks(mels[: self.frames_of(len(samples))])

    def with_chunks(self, mels: torch.Tensor) -> Inputs:
        """Return the inputs with the number of frames in each chunk."""
        lengths = [len(chunk) for chunk in mels.split(self.chunk)]
        return {"mels": mels.clone(), "chunks": torch.tensor(lengths, dtype=torch.int32)}

    def split(self, size: MediaSize, inputs: Inputs) -> list[tuple[MediaSize, Inputs]]:
        """Split audio at window boundaries. Parts without placeholder tokens are dropped."""
        parts = []
        for part_size, part in super().split(size, inputs):
            if part_size.num_placeholders:
                parts.append((part_size, self.with_chunks(part["mels"])))
        return parts

    def dummy_input(self) -> Inputs:
        return self.with_chunks(torch.zeros(4, self.extractor.feature_size))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        device = items[0]["mels"].device
        chunk_rows = self.chunk // 2
        padded = [self.chunks_of(item["mels"]) for item in items]
        rows = [(len(item["mels"]) - 1) // 2 + 1 for item in items]  # number of rows after the convolutions
        # Only the last chunk of an item contains padded rows.
        lengths = [len(chunks) * chunk_rows for chunks in padded]
        out = self.tower(
            padded_feature=torch.cat(padded).transpose(1, 2),
            chunk_lengths=torch.cat([item["chunks"] for item in items]),
            valid_indices=first_rows(lengths, rows, device),
            pool_indices=first_rows(rows, [count - 1 for count in rows], device, step=2),
            cu_seqlens=boundaries([(count, chunk_rows) for count in rows], device),
            max_seqlen=min(chunk_rows, max(rows)),
            return_dict=True,
        )
        features: torch.Tensor = out.last_hidden_state
        return features


class ChunkedAudioEncoder(QwenAudioEncoder):
    """Audio encoder of Qwen3-ASR: the tower of Qwen3-Omni with other arguments and a separate projector."""

    kind = Qwen3ASRFeatureExtractor
    extractor_options: ClassVar[Mapping[str, Any]] = {"n_window": 0}

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 1200.0) -> None:
        super().__init__(model, folder, max_seconds)

    def num_samples(self, media: Media) -> int:
        """Return the number of samples. The extractor pads short audio to `min_length`."""
        return max(super().num_samples(media), int(self.extractor.min_length))

    @property
    def projectors(self) -> Sequence[Any]:
        return (self.model.get_submodule("model.multi_modal_projector"),)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode every chunk as a separate audio clip.

        The tower would compute attention boundaries from the chunks, so the boundaries of the clips are passed instead.
        """
        placeholders = [self.count_placeholders(item) for item in items]
        chunks = torch.cat([self.chunks_of(item["mels"]) for item in items]).transpose(1, 2)
        is_audio = [self.chunks_of(torch.ones_like(item["mels"][:, :1])) for item in items]
        mask = torch.cat(is_audio).squeeze(-1).long()
        out = self.tower(
            input_features=chunks,
            input_features_mask=mask,
            cu_seqlens=boundaries([(count, self.window) for count in placeholders], chunks.device),
            max_seqlen=min(self.window, max(placeholders)),
        )
        projected: torch.Tensor = self.projectors[0](out.last_hidden_state)
        return projected


class VideoWithAudioEncoder(QwenVideoEncoder):
    """Video encoder that can also encode the audio of videos.

    The option `use_audio_in_video` turns this on, either for one video (in its row) or for all videos of a run. The
    placeholder tokens of frames and audio are then interleaved as in the model's processor. `build_thinker` sets
    `audio_modality`.
    """

    item_options = (*VIDEO_OPTIONS, AUDIO_IN_VIDEO)
    supports_audio = True
    # A tuple prevents torch from registering the encoder as a submodule.
    audio_modality: tuple[Modality, ...] = ()

    def measure(self, media: Media) -> MediaSize:
        size = super().measure(media)
        uses_audio = media.options.get(AUDIO_IN_VIDEO, self.use_audio_in_video)
        if not isinstance(uses_audio, bool):
            raise BadMedia(f"{media.name}: {AUDIO_IN_VIDEO} must be true or false, not {uses_audio!r}")
        if not uses_audio:
            return size
        if not isinstance(media.value, Path | bytes):
            raise BadMedia(f"{media.name}: {AUDIO_IN_VIDEO}: a list of frames has no audio. Use a video file.")
        (modality,) = self.audio_modality
        assert modality.encoder is not None
        try:
            audio_size = modality.encoder.measure(replace(media, modality="audio"))
        except BadMedia as error:
            raise BadMedia(f"{error} ({AUDIO_IN_VIDEO})") from None

        steps = int(size.shape[0])
        step_times = np.arange(steps) * size.shape[3] * self.model.config.position_id_per_seconds
        times = np.repeat(step_times, size.num_placeholders // steps)
        runs = self.interleave(times, audio_size.num_placeholders)
        return replace(size, layout=(modality.begin, *runs, modality.end), inside={"audio": audio_size})

    def interleave(self, times: npt.NDArray[np.float64], num_audio: int) -> list[int | NestedRun]:
        """Return runs of placeholder tokens that interleave a video and its audio.

        Args:
            times: Time of each placeholder token of the video, in units of one placeholder token of audio.
            num_audio: Number of placeholder tokens of the audio.
        """
        raise NotImplementedError


def interleave_chunks(times: npt.NDArray[np.float64], num_audio: int, chunk: int) -> list[int | NestedRun]:
    """Interleave in chunks of time, as Qwen2.5-Omni does: the video of a chunk, then its audio.

    Args:
        chunk: Length of a chunk, in placeholder tokens of audio.
    """

    def count_by_chunk(values: npt.NDArray[Any]) -> list[int]:
        counts = [0]
        for value in values:
            if value >= len(counts) * chunk:
                counts.append(0)
            counts[-1] += 1
        return counts

    video_runs = count_by_chunk(times)
    audio_runs = [NestedRun("audio", count) for count in count_by_chunk(np.arange(num_audio))]
    runs = chain.from_iterable(zip_longest(video_runs, audio_runs))
    return [run for run in runs if run is not None]


def interleave_by_time(times: npt.NDArray[np.float64], num_audio: int) -> list[int | NestedRun]:
    """Interleave token by token in order of time, as Qwen3-Omni does. At equal times, video precedes audio."""
    order = np.argsort(np.concatenate([times, np.arange(num_audio)]), kind="stable")
    is_audio_token = (order >= len(times)).tolist()
    runs: list[int | NestedRun] = []
    for is_audio, tokens in groupby(is_audio_token):
        count = len(list(tokens))
        runs.append(NestedRun("audio", count) if is_audio else count)
    return runs


def build_thinker(
    specs: Mapping[str, EncoderSpec], model: PreTrainedModel, folder: str | None, options: Options
) -> dict[str, Modality]:
    """Build the encoders. The video encoder gets the modality that encodes the audio of videos."""
    modalities = build_modalities(specs, model, folder, options)
    video_encoder = modalities["video"].encoder
    assert isinstance(video_encoder, VideoWithAudioEncoder)
    video_encoder.audio_modality = (modalities["audio"],)
    return modalities


def thinker_positions(model: PreTrainedModel, ids: Ids, items: Sequence[MediaItem]) -> npt.NDArray[Any]:
    """Return positions `[4, tokens]`: position in the text, time, height and width. The first one separates samples."""
    tokens = torch.from_numpy(ids).long()[None]
    has_audio = {bool(item.size.inside) for item in items if item.port.modality == "video"}
    if len(has_audio) > 1:
        raise BadMedia(f"{AUDIO_IN_VIDEO}: the videos of a row must all use their audio, or none of them")
    position_model: Any = model
    axes, _ = position_model.get_rope_index(
        tokens,
        attention_mask=torch.ones_like(tokens),
        use_audio_in_video=True in has_audio,
        **media_shapes(items),
    )
    positions = with_text_positions(axes)
    dtype = torch.float32 if axes.is_floating_point() else torch.int32
    return positions.to(dtype).numpy()
