"""How sound enters published audio models: towers in the manner of Whisper, which take whole windows (30 s) and nothing
else, and the chunked tower of Qwen3-ASR, which takes sound of any length.

A window is what the model's own feature extractor makes of one sound, so an item gives the same features in any
company. Lengths are told by shapes: nothing is read back from the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

from omnizoo.modalities.base import Inputs, Modality, Size
from omnizoo.modalities.files import SOUND_OPTIONS, read_sound, sound_length
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work
from omnizoo.models.media_batch import Features
from omnizoo.recipes.qwen_sound import AudioTower
from omnizoo.recipes.qwen_towers import Tower, boundaries, build_modalities, preprocessor, put

TOWER, PROJECTOR = "model.audio_tower", "model.multi_modal_projector"
STRIDE = 2  # of the convolutions ahead of a Whisper-type tower's layers


class WindowTower(Tower):
    """Sound as log-mel windows of the one length that the tower takes."""

    item_options = SOUND_OPTIONS

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float) -> None:
        super().__init__(model, TOWER)
        # It makes the batch of windows itself and attends within each: there is nothing to pack.
        self.tower.config._attn_implementation = "sdpa"
        audio = model.config.audio_config
        self.extractor = preprocessor(WhisperFeatureExtractor, folder, {}, feature_size=audio.num_mel_bins)
        self.rate: int = self.extractor.sampling_rate
        self.positions: int = audio.max_source_positions
        self.samples: int = self.positions * STRIDE * self.extractor.hop_length  # of a window
        self.max_seconds = max_seconds

    @property
    def projector(self) -> Any:
        return self.model.get_submodule(PROJECTOR)

    @cached_property
    def work(self) -> tuple[float, float]:
        """FLOPs of a window in the tower, and of a place in the projector."""
        work, place = Work.of(self.tower), Tally(self.tower_is_trained)
        place.run(self.projector, 1)
        return work.flops(self.positions), place.flops

    @property
    def tower_is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.tower.parameters())

    def size_of(self, windows: int, places: int) -> Size:
        per_window, per_place = self.work
        return Size(places, cost=windows * per_window + places * per_place)


class MaskedWindows(WindowTower):
    """Qwen2-Audio: one window, in which the tower does not see what is padding, and which has no places for it."""

    most: ClassVar[int] = 1  # windows of a sound

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float | None = None) -> None:
        super().__init__(model, folder, 0.0)
        longest = self.most * self.samples / self.rate
        self.max_seconds = min(max_seconds or longest, longest)

    def frames_of(self, samples: int) -> list[int]:
        """Mel frames of each window that are sound."""
        full, rest = divmod(samples, self.samples)
        return [self.positions * STRIDE] * full + ([-(-rest // self.extractor.hop_length)] if rest else [])

    def heard(self, frames: int) -> int:
        """Positions of a window that are sound; pairs of them become places."""
        return (frames - 1) // STRIDE + 1

    def measure(self, media: Media) -> Size:
        samples = sound_length(media, self.rate, self.max_seconds)
        frames = self.frames_of(samples)
        places = sum(self.heard(each) // 2 for each in frames)
        if not places:
            raise BadMedia(f"{media.name} is {samples / self.rate:.3f} s long: too short for a single place")
        return self.size_of(len(frames), places)

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        windows = [sound[start : start + self.samples] for start in range(0, len(sound), self.samples)]
        out = self.extractor(
            windows, sampling_rate=self.rate, padding="max_length", max_length=self.samples, return_tensors="pt"
        )
        return self.windows(out["input_features"], self.frames_of(len(sound))[-1])

    def windows(self, mels: torch.Tensor, frames: int) -> Inputs:
        """`mels [n, bins, T]`, of whose last so many frames are sound, by the length of what tells it."""
        return {"mels": mels, "frames": torch.arange(frames, dtype=torch.int32)}

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Windows do not see each other."""
        if len(inputs["mels"]) == 1:
            return [(size, inputs)]
        frames = self.frames_in(inputs)
        own = [self.windows(mels[None].clone(), n) for mels, n in zip(inputs["mels"], frames, strict=True)]
        sizes = [self.size_of(1, self.places(each)) for each in own]
        return [(part, each) for part, each in zip(sizes, own, strict=True) if part.places]

    def blank(self) -> Inputs:
        return self.windows(torch.zeros(1, self.extractor.feature_size, self.positions * STRIDE), 2 * STRIDE)

    def frames_in(self, inputs: Inputs) -> list[int]:
        return [self.positions * STRIDE] * (len(inputs["mels"]) - 1) + [len(inputs["frames"])]

    def places(self, inputs: Inputs) -> int:
        return sum(self.heard(frames) // 2 for frames in self.frames_in(inputs))

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        mels = torch.cat([item["mels"] for item in items])
        frames = [each for item in items for each in self.frames_in(item)]
        features = self.hear(mels, frames)
        kept = [window[: self.heard(each) // 2] for window, each in zip(features, frames, strict=True)]
        projected: torch.Tensor = self.projector(torch.cat(kept))
        return projected

    def hear(self, mels: torch.Tensor, frames: Sequence[int]) -> Any:
        """What the tower makes of windows of so many frames."""
        positions = torch.arange(self.positions, device=mels.device)
        is_sound = torch.stack([positions < self.heard(each) for each in frames])
        mask = is_sound[:, None, None].expand(-1, 1, self.positions, -1)
        return self.tower(mels, attention_mask=mask, return_dict=True).last_hidden_state


class SeveralWindows(MaskedWindows):
    """Audio Flamingo 3: the same for up to 20 windows, one after the other."""

    most = 20

    def hear(self, mels: torch.Tensor, frames: Sequence[int]) -> Any:
        each = torch.arange(mels.shape[2], device=mels.device)
        mask = torch.stack([each < n for n in frames])
        return self.tower(mels, input_features_mask=mask, return_dict=True).last_hidden_state


class FullWindows(WindowTower):
    """Voxtral: as many windows as the sound begins, silence and all: the model was trained with places for it."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 1800.0) -> None:
        super().__init__(model, folder, max_seconds)
        audio = model.config.audio_config
        self.stacked: int = audio.intermediate_size // audio.hidden_size  # positions that become one place

    def measure(self, media: Media) -> Size:
        windows = -(-sound_length(media, self.rate, self.max_seconds) // self.samples)
        return self.size_of(windows, windows * self.positions // self.stacked)

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        out = self.extractor(
            sound,
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.samples,
            return_tensors="pt",
        )
        mels = out["input_features"][0]
        return {"mels": mels.unflatten(1, (-1, self.positions * STRIDE)).transpose(0, 1).contiguous()}

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Windows do not see each other."""
        windows = inputs["mels"].unbind()
        each = replace(size, places=size.places // len(windows), cost=size.cost / len(windows))
        return [(each, {"mels": window[None].clone()}) for window in windows]

    def blank(self) -> Inputs:
        return {"mels": torch.zeros(1, self.extractor.feature_size, self.positions * STRIDE)}

    def places(self, inputs: Inputs) -> int:
        return len(inputs["mels"]) * self.positions // self.stacked

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        out = self.tower(torch.cat([item["mels"] for item in items]), return_dict=True).last_hidden_state
        projected: torch.Tensor = self.projector(out.reshape(-1, self.stacked * out.shape[-1]))
        return projected


class ChunkTower(AudioTower):
    """Qwen3-ASR: the chunked tower of Qwen3-Omni behind another call, with a projector of its own."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 1200.0) -> None:
        super().__init__(model, folder, max_seconds)
        audio = model.config.audio_config
        self.extractor = preprocessor(Qwen3ASRFeatureExtractor, folder, {}, feature_size=audio.num_mel_bins)

    def measure(self, media: Media) -> Size:
        """Short sounds are taken for as long as the extractor makes them."""
        samples = max(sound_length(media, self.rate, self.max_seconds), self.extractor.min_length)
        frames = samples // self.extractor.hop_length
        places = int(self.places_of(torch.tensor(frames)))
        return Size(places, cost=self.flops(frames, places), shape=(frames,))

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        out = self.extractor(
            sound, sampling_rate=self.rate, padding=True, truncation=False, n_window=0, return_tensors="pt"
        )
        return {"mels": out["input_features"][0].T}

    @property
    def after(self) -> Sequence[Any]:
        return (self.model.get_submodule(PROJECTOR),)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Every chunk as a sound of its own: what the tower makes of sounds is then given for whole ones."""
        chunk, lengths, places = self.chunk, [len(item["mels"]) for item in items], [self.places(i) for i in items]
        padded = [pad(item["mels"], (0, 0, 0, -len(item["mels"]) % chunk)).unflatten(0, (-1, chunk)) for item in items]
        chunks = torch.cat(padded).transpose(1, 2)
        frames = torch.arange(chunk, device=chunks.device)
        full = [np.minimum(chunk, n - chunk * np.arange(-(-n // chunk))) for n in lengths]
        mask = torch.stack([frames < int(n) for n in np.concatenate(full)]).long()
        out = self.tower(
            input_features=chunks,
            input_features_mask=mask,
            cu_seqlens=boundaries([(n, self.window) for n in places], chunks.device),
            max_seqlen=min(self.window, max(places)),
        )
        projected: torch.Tensor = self.after[0](out.last_hidden_state)
        return projected


def sound_only(
    tower: Callable[..., Tower], begin: str, placeholder: str, end: str = "", in_chat: str = "{item}"
) -> Callable[[PreTrainedModel, str | None, Mapping[str, Mapping[str, Any]]], dict[str, Modality]]:
    """`modalities` of a recipe for a model that reads sound beside text. `in_chat`: as of `Modality`."""

    def build(
        model: PreTrainedModel, folder: str | None, options: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Modality]:
        built = build_modalities({"audio": (tower, begin, placeholder, end)}, model, folder, options)
        return {name: replace(modality, in_chat=in_chat) for name, modality in built.items()}

    return build


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Features in the places of their placeholders."""
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    for arrived in features.values():
        embeddings = put(embeddings, arrived.index, arrived.values)
    return inputs | {"input_ids": None, "inputs_embeds": embeddings}
