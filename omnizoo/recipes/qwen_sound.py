"""Sound in the published Qwen omni models: by itself, and inside of clips, interleaved with their frames."""

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
from transformers import PreTrainedModel, WhisperFeatureExtractor

from omnizoo.modalities.base import Inputs, Inside, Item, Modality, Size
from omnizoo.modalities.files import CLIP_OPTIONS, SOUND_OPTIONS, read_sound, sound_length
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.tally import Tally
from omnizoo.models.media_model import Ids
from omnizoo.recipes.qwen_clips import OWN_SOUND, VideoTower
from omnizoo.recipes.qwen_towers import Tower, boundaries, build_modalities, preprocessor, shapes_of

MOST_WINDOWS = 4  # of a part of a sound: ranks share out what is longer


class AudioTower(Tower):
    """Sound as mel frames, in chunks of a second that take 13 places each."""

    item_options = SOUND_OPTIONS

    published: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 300.0) -> None:
        super().__init__(model, "model.audio_tower")
        audio = model.config.audio_config
        self.chunk: int = 2 * audio.n_window
        self.extractor = preprocessor(WhisperFeatureExtractor, folder, self.published, feature_size=audio.num_mel_bins)
        self.rate: int = self.extractor.sampling_rate
        self.max_seconds = max_seconds

    def frames_of(self, samples: int) -> int:
        return samples // int(self.extractor.hop_length)

    def places_of(self, frames: torch.Tensor) -> torch.Tensor:
        """Three convolutions of stride 2 see each chunk by itself."""
        return frames // self.chunk * -(-self.chunk // 8) - (-(frames % self.chunk) // 8)

    def measure(self, media: Media) -> Size:
        samples = sound_length(media, self.rate, self.max_seconds)
        if samples < self.extractor.n_fft:
            raise BadMedia(f"{media.name} is {samples / self.rate:.3f} s long: too short for a single mel frame")
        frames = self.frames_of(samples)
        places = int(self.places_of(torch.tensor(frames)))
        return Size(places, cost=self.flops(frames, places), shape=(frames,))

    def flops(self, frames: int, places: int) -> float:
        """Convolutions see whole chunks; layers attend over windows of several."""
        per_chunk, per_place, per_pair = self.work
        window = self.window
        full, rest = divmod(places, window)
        return -(-frames // self.chunk) * per_chunk + places * per_place + (full * window**2 + rest**2) * per_pair

    @property
    def window(self) -> int:
        """Places that see each other."""
        chunks: int = self.tower.n_window_infer // self.chunk
        return -(-self.chunk // 8) * chunks

    @property
    def frames_together(self) -> int:
        """Frames of a window."""
        frames: int = self.tower.n_window_infer
        return frames

    @cached_property
    def work(self) -> tuple[float, float, float]:
        """FLOPs of a chunk, a place and a pair."""
        tower, bins, length = self.tower, self.extractor.feature_size, self.chunk
        chunk = Tally()
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            bins, length = -(-bins // 2), -(-length // 2)
            chunk.multiply(convolution.weight, bins * length)
        chunk.run(tower.conv_out, length)
        place = Tally(chunk.trained)
        place.run(tower.layers, 1)
        pair = Tally(place.trained)
        pair.attend(len(tower.layers), tower.config.d_model)
        for projector in self.after:
            place.run(projector, 1)
        return chunk.flops, place.flops, pair.flops

    @property
    def after(self) -> Sequence[nn.Module]:
        """What follows the layers."""
        return (self.tower.proj1, self.tower.proj2)

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        out = self.extractor(sound, sampling_rate=self.rate, padding=True, truncation=False, return_tensors="pt")
        return {"mels": out["input_features"][0].T}  # [frames, bins]

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Places see those of their own window."""
        pieces = inputs["mels"].split(MOST_WINDOWS * self.frames_together)
        lengths = [(len(piece), self.places({"mels": piece})) for piece in pieces]
        sizes = [replace(size, places=places, cost=self.flops(frames, places)) for frames, places in lengths]
        return [(own, {"mels": piece.clone()}) for own, piece in zip(sizes, pieces, strict=True)]

    def blank(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size)}

    def places(self, inputs: Inputs) -> int:
        return int(self.places_of(torch.tensor(len(inputs["mels"]))))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """The tower pads chunks to the longest of a call, and what it makes of a short one depends on that: so all are
        padded to whole ones here, and an item gives the same features in any company."""
        chunk, places = self.chunk, [self.places(item) for item in items]
        padded = [pad(item["mels"], (0, 0, 0, -len(item["mels"]) % chunk)).unflatten(0, (-1, chunk)) for item in items]
        device, window = padded[0].device, self.window
        # Only the last chunk of an item has places that are padding.
        ends = np.cumsum([len(chunks) for chunks in padded]) * -(-chunk // 8)
        starts = [0, *ends[:-1].tolist()]
        kept = [torch.arange(start, start + n, device=device) for start, n in zip(starts, places, strict=True)]
        out = self.tower(
            padded_feature=torch.cat(padded).transpose(1, 2),
            chunk_lengths=torch.empty(0),  # read for what is given here already
            valid_indices=torch.cat(kept),
            cu_seqlens=boundaries([(n, window) for n in places], device),
            max_seqlen=min(window, max(places)),
            return_dict=True,
        )
        features: torch.Tensor = out.last_hidden_state
        return features


class PooledAudioTower(AudioTower):
    """Sound as mel frames, in chunks of two seconds that are attended to one by one; two of its rows become a place:
    Qwen2.5-Omni. What is longer than the extractor's `chunk_length` the published model never heard."""

    published: ClassVar[Mapping[str, Any]] = {"chunk_length": 300}  # seconds

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float | None = None) -> None:
        super().__init__(model, folder)
        self.max_seconds = min(max_seconds or float("inf"), self.extractor.chunk_length)

    def frames_of(self, samples: int) -> int:
        return -(-samples // int(self.extractor.hop_length))

    def places_of(self, frames: torch.Tensor) -> torch.Tensor:
        return ((frames - 1) // 2 + 1) // 2

    @property
    def window(self) -> int:
        return self.chunk // 4

    @property
    def frames_together(self) -> int:
        return 4 * self.chunk

    @cached_property
    def work(self) -> tuple[float, float, float]:
        """FLOPs of a chunk, a place and a pair of places; a place is two rows, and a pair four."""
        tower, chunk = self.tower, Tally()
        chunk.multiply(tower.conv1.weight, self.chunk)
        chunk.multiply(tower.conv2.weight, self.chunk // 2)
        place = Tally(chunk.trained)
        place.run(tower.layers, 2)
        pair = Tally(place.trained)
        pair.attend(4 * len(tower.layers), tower.config.d_model)
        place.run(tower.proj, 1)
        return chunk.flops, place.flops, pair.flops

    def prepare(self, media: Media) -> Inputs:
        """The published processor pads with silence up to its `chunk_length`, and leaves that out afterwards: what
        remains of it is the silence that the last windows see."""
        sound, extractor = read_sound(media, self.rate, self.max_seconds), self.extractor
        padded = np.pad(
            sound, (0, max(0, min(extractor.n_fft + extractor.hop_length, extractor.n_samples - len(sound))))
        )
        out = extractor(padded, sampling_rate=self.rate, padding=True, truncation=False, return_tensors="pt")
        return self.with_chunks(out["input_features"][0].T[: self.frames_of(len(sound))])

    def with_chunks(self, mels: torch.Tensor) -> Inputs:
        lengths = [len(piece) for piece in mels.split(self.chunk)]
        return {"mels": mels.clone(), "chunks": torch.tensor(lengths, dtype=torch.int32)}

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        return [(own, self.with_chunks(part["mels"])) for own, part in super().parts(size, inputs) if own.places]

    def blank(self) -> Inputs:
        return self.with_chunks(torch.zeros(4, self.extractor.feature_size))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        chunk, device = self.chunk, items[0]["mels"].device
        padded = [pad(item["mels"], (0, 0, 0, -len(item["mels"]) % chunk)).unflatten(0, (-1, chunk)) for item in items]
        rows = [(len(item["mels"]) - 1) // 2 + 1 for item in items]  # after the convolutions
        # Only the last chunk of an item has rows that are padding.
        begins = np.cumsum([0, *(len(chunks) * chunk // 2 for chunks in padded)]).tolist()
        starts = np.cumsum([0, *rows]).tolist()
        kept = [torch.arange(at, at + n, device=device) for at, n in zip(begins, rows, strict=False)]
        pairs = [torch.arange(at, at + n - 1, 2, device=device) for at, n in zip(starts, rows, strict=False)]
        out = self.tower(
            padded_feature=torch.cat(padded).transpose(1, 2),
            chunk_lengths=torch.cat([item["chunks"] for item in items]),
            valid_indices=torch.cat(kept),
            pool_indices=torch.cat(pairs),
            cu_seqlens=boundaries([(n, chunk // 2) for n in rows], device),
            max_seqlen=min(chunk // 2, max(rows)),
            return_dict=True,
        )
        features: torch.Tensor = out.last_hidden_state
        return features


class SoundingClips(VideoTower):
    """Clips whose own sound may be read with them: `use_audio_in_video`, of a clip in its row or of all of them. Frames
    and sound then take turns, as the published processor writes them. `sound` is set by whoever builds it."""

    item_options = (*CLIP_OPTIONS, OWN_SOUND)
    may_sound = True
    sound: tuple[Modality, ...] = ()  # in a tuple, where torch does not look: it has an encoder

    def measure(self, media: Media) -> Size:
        size = super().measure(media)
        wanted = media.options.get(OWN_SOUND, self.use_audio_in_video)
        if not isinstance(wanted, bool):
            raise BadMedia(f"{media.name}: {OWN_SOUND} must be true or false, not {wanted!r}")
        if not wanted:
            return size
        if not isinstance(media.value, Path | bytes):
            raise BadMedia(f"{media.name}: {OWN_SOUND}: frames given one by one have no sound; give the clip as a file")
        (modality,) = self.sound
        assert modality.encoder is not None
        try:
            sound = modality.encoder.measure(replace(media, modality="audio"))
        except BadMedia as bad:
            raise BadMedia(f"{bad} ({OWN_SOUND})") from None
        steps = int(size.shape[0])
        times = np.arange(steps) * size.shape[3] * self.model.config.position_id_per_seconds
        runs = self.turns(np.repeat(times, size.places // steps), sound.places)
        return replace(size, layout=(modality.begin, *runs, modality.end), inside={"audio": sound})

    def turns(self, times: npt.NDArray[np.float64], heard: int) -> list[int | Inside]:
        """Runs of places of the clip, each of which is at its time, and of its sound, a place for each unit of time."""
        raise NotImplementedError


def in_chunks(times: npt.NDArray[np.float64], heard: int, chunk: int) -> list[int | Inside]:
    """What is seen in a chunk of so much time, then what is heard in it, and so on: Qwen2.5-Omni."""

    def lengths(values: npt.NDArray[Any]) -> list[int]:
        counts = [0]
        for value in values:
            if value >= len(counts) * chunk:
                counts.append(0)
            counts[-1] += 1
        return counts

    seen, sounds = lengths(times), [Inside("audio", count) for count in lengths(np.arange(heard))]
    turns = chain.from_iterable(zip_longest(seen, sounds))
    return [run for run in turns if run is not None]


def by_time(times: npt.NDArray[np.float64], heard: int) -> list[int | Inside]:
    """Place by place, whichever comes first, and what is seen before what is heard at the same time: Qwen3-Omni."""
    order = np.argsort(np.concatenate([times, np.arange(heard)]), kind="stable")
    runs = [(is_sound, sum(1 for _ in run)) for is_sound, run in groupby((order >= len(times)).tolist())]
    return [Inside("audio", count) if is_sound else count for is_sound, count in runs]


def build_thinker(
    kinds: Mapping[str, Any], model: PreTrainedModel, folder: str | None, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Modality]:
    """As `build_modalities`; clips know who reads their sound."""
    built = build_modalities(kinds, model, folder, options)
    clips = built["video"].encoder
    assert isinstance(clips, SoundingClips)
    clips.sound = (built["audio"],)
    return built


def thinker_positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item]) -> npt.NDArray[Any]:
    """`[4, L]`: in the text, by which samples are told apart; then time, height and width."""
    tokens = torch.from_numpy(ids).long()[None]
    sounds, clips = shapes_of(items, "audio"), shapes_of(items, "video")
    sounding = {bool(item.size.inside) for item in items if item.port.modality == "video"}
    if len(sounding) > 1:
        raise BadMedia(f"{OWN_SOUND}: some of its clips come with their sound and some do not; this model takes no mix")
    family: Any = model
    axes, _ = family.get_rope_index(
        tokens,
        image_grid_thw=shapes_of(items, "image"),
        video_grid_thw=None if clips is None else clips[:, :3].long(),
        attention_mask=torch.ones_like(tokens),
        use_audio_in_video=True in sounding,
        audio_seqlens=None if sounds is None else sounds[:, 0],
        second_per_grids=None if clips is None else clips[:, 3],
    )
    counted = torch.cat([torch.arange(len(ids))[None], axes[:, 0]])
    return (counted.float() if axes.is_floating_point() else counted.int()).numpy()
