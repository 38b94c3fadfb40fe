"""How media enter the published Qwen3 omni models: their own towers as encoders, their own merge into the text.

An encoder here has no weights: it calls the model it was made for. Features of deepstack models carry all their levels
side by side, so that they travel once; `enter_visual` takes them apart again.

Nothing is read back from the device: what a tower needs to know of sizes is made before, or told by shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, Qwen2VLImageProcessorPil, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Encoder, Inputs, Item, Modality, Size
from omnizoo.modalities.files import (
    CLIP_OPTIONS,
    PICTURE_OPTIONS,
    SOUND_OPTIONS,
    picture_size,
    read_frames,
    read_picture,
    read_sound,
    sample_times,
    sound_length,
    video_size,
)
from omnizoo.modalities.image import thumbnail
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work
from omnizoo.models.hf_private import PACKED, attend_packed, attention_name, language_model
from omnizoo.models.media_batch import Features

MOST_PATCHES, MOST_WINDOWS = 2048, 4  # of a part of a clip or a sound: ranks share out what is longer
SHARE = 2**62  # what a weight of 1 is in whole numbers
LEVELS = "deepstack_levels"  # the keyword that carries them through the model
BEGIN, END = "<|vision_start|>", "<|vision_end|>"
IMAGES = {
    "size": {"shortest_edge": 64 * 32**2, "longest_edge": 16384 * 32**2},  # pixels
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
# For `omnizoo verify`: two levels of deepstack and a layer more (what is added after the last one, nobody attends to);
# M-RoPE shares 8 frequencies as the published share 64.
SHRINK = {
    "text_config": {"num_hidden_layers": 3, "rope_parameters": {"mrope_section": [4, 2, 2]}},
    "vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}


class Tower(Encoder):
    """A part of a published model, as an encoder."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, where torch does not look: the model must not become its own part's child
        self.name = name
        if attention_name(model) == PACKED:
            attend_packed(self.tower)

    @property
    def model(self) -> Any:
        return self._model[0]

    @property
    def tower(self) -> Any:
        return self.model.get_submodule(self.name)


class ImageTower(Tower):
    """Images of `min_pixels` to `max_pixels`; by default what the folder's preprocessor says."""

    item_options = PICTURE_OPTIONS

    def __init__(
        self, model: PreTrainedModel, folder: str | None, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        super().__init__(model, "model.visual")
        self.vision = vision = model.config.vision_config
        self.factor: int = vision.patch_size * vision.spatial_merge_size  # pixels along the edge of one place's square
        self.processor = preprocessor(
            Qwen2VLImageProcessorPil,
            folder,
            IMAGES,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )
        most = max_pixels or self.processor.size.longest_edge
        least = min_pixels or min(self.processor.size.shortest_edge, most)
        if least > most:
            raise UserError(f"model.modalities: min_pixels {least} is above max_pixels {most} of {type(self).__name__}")
        self.pixels = (least, most)

    @cached_property
    def work(self) -> Work:
        return Work.of(self.tower)

    def measure(self, media: Media) -> Size:
        return self.size_of(1, *self.resized(1, *picture_size(media), media))

    def resized(self, frames: int, height: int, width: int, media: Media) -> tuple[int, int]:
        """Height and width as the tower sees them."""
        if max(height, width) > 200 * min(height, width):
            raise BadMedia(f"{media.name} is {width} x {height} pixels: one edge is more than 200 times the other")
        return self.fit(frames, height, width)

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        fitted: tuple[int, int] = smart_resize(height, width, self.factor, *self.pixels)
        return fitted

    def size_of(self, steps: int, height: int, width: int) -> Size:
        grid = (steps, height // self.vision.patch_size, width // self.vision.patch_size)
        patches = grid[1] * grid[2]  # those of a step see each other
        cost = steps * self.work.flops(patches)
        return Size(steps * patches // self.vision.spatial_merge_size**2, cost, shape=grid)

    def prepare(self, media: Media) -> Inputs:
        limits = dict(zip(("shortest_edge", "longest_edge"), self.pixels, strict=True))
        out = self.processor(images=read_picture(media), size=limits, return_tensors="pt")
        return self.with_places(out["pixel_values"], out["image_grid_thw"][0])

    def blank(self) -> Inputs:
        merge = self.vision.spatial_merge_size
        values = self.vision.in_channels * self.vision.temporal_patch_size * self.vision.patch_size**2
        return self.with_places(torch.zeros(merge**2, values), torch.tensor([1, merge, merge]))

    def with_places(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        """All that depends on the grid is made here: on the device, the tower would have to read it."""
        tower, merge = self.tower, self.vision.spatial_merge_size
        taps, shares = get_vision_interpolation_indices_and_weights(
            grid[None],
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        positions = get_vision_position_ids(grid[None], merge).int()
        return {
            "pixels": pixels,
            "grid": grid,
            "positions": positions.unflatten(0, (int(grid[0]), -1)),  # [steps, patches, 2]: the shape tells both
            "taps": taps.int(),
            # Whole numbers, for floats come in the precision of the computation; none of an fp32's digits is lost.
            "shares": (shares.double() * SHARE).long(),
        }

    def preview(self, media: Media) -> str:
        return thumbnail(read_picture(media), media.name)

    def places(self, inputs: Inputs) -> int:
        merge: int = self.vision.spatial_merge_size
        return len(inputs["pixels"]) // merge**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        pixels, taps, shares = (torch.cat([item[name] for item in items]) for name in ("pixels", "taps", "shares"))
        shapes = [item["positions"].shape for item in items]
        out = self.tower(
            pixels.type(self.tower.dtype),
            grid_thw=None,
            cu_seqlens=boundaries([(steps * patches, patches) for steps, patches, _ in shapes], pixels.device),
            max_seqlen=max(patches for _, patches, _ in shapes),
            position_ids=torch.cat([item["positions"].flatten(0, 1) for item in items]),
            interp_indices=taps,
            interp_weights=shares.to(torch.float32) / SHARE,
            return_dict=True,
        )
        return torch.cat([out.pooler_output, *out.deepstack_features], 1)


class VideoTower(ImageTower):
    """Clips as `fps` frames a second, `min_frames` to `max_frames` of them; a few frames together become a step."""

    item_options = CLIP_OPTIONS

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | None,
        min_pixels: int | None = None,
        max_pixels: int = 768 * 32**2,
        fps: float = 2.0,
        min_frames: int = 4,
        max_frames: int = 768,
        max_seconds: float = 3600.0,
    ) -> None:
        super().__init__(model, folder, min_pixels or min(128 * 32**2, max_pixels), max_pixels)
        self.fps, self.min_frames, self.max_frames, self.max_seconds = fps, min_frames, max_frames, max_seconds
        self.together: int = self.vision.temporal_patch_size

    def sample(self, media: Media) -> tuple[list[float], tuple[int, int]]:
        """When frames are taken, and their height and width as the tower sees them."""
        seconds, height, width = video_size(media, self.fps, self.max_seconds)
        times = sample_times(seconds, max(self.fps, self.min_frames / seconds), self.max_frames)
        return times, self.resized(len(times), height, width, media)

    def steps(self, times: list[float]) -> npt.NDArray[np.float64]:
        """`[steps, together]`: the last frame again and again, until steps are whole."""
        return np.pad(times, (0, -len(times) % self.together), mode="edge").reshape(-1, self.together)

    def measure(self, media: Media) -> Size:
        times, size = self.sample(media)
        steps = self.steps(times)
        measured = self.size_of(len(steps), *size)
        layout = self.layout(steps[:, [0, -1]].mean(1), measured.places // len(steps))
        return replace(measured, layout=layout, shape=(*measured.shape, self.together / self.fps))

    def layout(self, seconds: npt.NDArray[np.float64], places: int) -> tuple[str | int, ...]:
        """Of a clip with a step of `places` at each of `seconds`: one run."""
        return ()

    def prepare(self, media: Media) -> Inputs:
        times, (height, width) = self.sample(media)
        steps = self.steps(times)
        frames = read_frames(media, steps.flatten().tolist(), self.fps)
        resized = [frame.resize((width, height), self.processor.resample) for frame in frames]
        out = self.processor(images=resized, do_resize=False, return_tensors="pt")
        # The processor makes a step of every frame by itself: what is wanted of a step's t-th frame is its t-th part.
        values = (self.vision.in_channels, self.together, self.vision.patch_size**2)
        parts = out["pixel_values"].view(*steps.shape, -1, *values).diagonal(dim1=1, dim2=4)
        grid = torch.tensor([len(steps), *out["image_grid_thw"][0, 1:].tolist()])
        return self.with_places(parts.movedim(-1, 3).flatten(2).flatten(0, 1), grid)

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Patches see those of their own step."""
        steps, patches, _ = inputs["positions"].shape
        together = max(1, MOST_PATCHES // patches)
        if steps <= together:
            return [(size, inputs)]
        split = {name: inputs[name].split(together * patches) for name in ("pixels", "taps", "shares")}
        parts = []
        for number, positions in enumerate(inputs["positions"].split(together)):
            share = len(positions) / steps
            own = {name: pieces[number].clone() for name, pieces in split.items()}  # a view would travel whole
            own |= {"positions": positions.clone(), "grid": inputs["grid"] * 1}
            own["grid"][0] = len(positions)
            parts.append((replace(size, places=round(size.places * share), cost=size.cost * share), own))
        return parts

    def preview(self, media: Media) -> str:
        times = self.sample(media)[0]
        few = times[:: -(-len(times) // 8)]
        frames = read_frames(media, few, self.fps)
        return "".join(thumbnail(frame, f"{time:.1f} s", 96) for frame, time in zip(frames, few, strict=True))


class AudioTower(Tower):
    """Sound as mel frames, in chunks of a second that take 13 places each."""

    item_options = SOUND_OPTIONS

    def __init__(self, model: PreTrainedModel, folder: str | None, max_seconds: float = 300.0) -> None:
        super().__init__(model, "model.audio_tower")
        audio = model.config.audio_config
        self.chunk: int = 2 * audio.n_window
        self.extractor = preprocessor(WhisperFeatureExtractor, folder, {}, feature_size=audio.num_mel_bins)
        self.rate: int = self.extractor.sampling_rate
        self.max_seconds = max_seconds

    def places_of(self, frames: torch.Tensor) -> torch.Tensor:
        """Three convolutions of stride 2 see each chunk by itself."""
        return frames // self.chunk * -(-self.chunk // 8) - (-(frames % self.chunk) // 8)

    def measure(self, media: Media) -> Size:
        samples = sound_length(media, self.rate, self.max_seconds)
        if samples < self.extractor.n_fft:
            raise BadMedia(f"{media.name} is {samples / self.rate:.3f} s long: too short for a single mel frame")
        frames = samples // self.extractor.hop_length
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

    @cached_property
    def work(self) -> tuple[float, float, float]:
        """FLOPs of a chunk, a place and a pair."""
        tower, bins, length = self.tower, self.tower.num_mel_bins, self.chunk
        chunk = Tally()
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            bins, length = -(-bins // 2), -(-length // 2)
            chunk.multiply(convolution.weight, bins * length)
        chunk.run(tower.conv_out, length)
        place = Tally(chunk.trained)
        place.run(tower.layers, 1)
        pair = Tally(place.trained)
        pair.attend(len(tower.layers), tower.config.d_model)
        place.run(tower.proj1, 1)
        place.run(tower.proj2, 1)
        return chunk.flops, place.flops, pair.flops

    def prepare(self, media: Media) -> Inputs:
        sound = read_sound(media, self.rate, self.max_seconds)
        out = self.extractor(sound, sampling_rate=self.rate, padding=True, truncation=False, return_tensors="pt")
        return {"mels": out["input_features"][0].T}  # [frames, bins]

    def parts(self, size: Size, inputs: Inputs) -> list[tuple[Size, Inputs]]:
        """Places see those of their own window."""
        pieces = inputs["mels"].split(MOST_WINDOWS * self.tower.n_window_infer)
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


def boundaries(runs: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Cumulative lengths, where items of so many places are attended to so many at a time. Nothing is copied there."""
    ends = np.cumsum([length for length, _ in runs]).tolist()
    starts = [
        torch.arange(end - length, end, each, device=device, dtype=torch.int32)
        for end, (length, each) in zip(ends, runs, strict=True)
    ]
    return torch.cat([*starts, torch.full((1,), ends[-1], device=device, dtype=torch.int32)])


def build_modalities(
    kinds: Mapping[str, tuple[Callable[..., Tower], str, str, str]],
    model: PreTrainedModel,
    folder: str | None,
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Modality]:
    """`kinds`: by modality its tower and its marks (begin, placeholder, end)."""
    built = {}
    language_model(model).register_forward_pre_hook(take_levels, with_kwargs=True)
    for name, (tower, begin, placeholder, end) in kinds.items():
        given = options.get(name, {})
        try:
            signature(tower).bind(model, folder, **given)
        except TypeError as error:
            raise UserError(f"model.modalities.{name}.encoder.options: {error}") from error
        built[name] = Modality(name, tower(model, folder, **given), None, begin, placeholder, end)
    return built


def shapes_of(items: Sequence[Item], modality: str) -> torch.Tensor | None:
    """`[n, ...]`, of a sample's items of one modality; None: it has none."""
    shapes = [item.size.shape for item in items if item.port.modality == modality]
    return torch.tensor(shapes) if shapes else None


def enter_visual(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Put features among the embeddings, by index: the model would pick their places by masks, which the host has to
    wait for. Always both kinds, so that every rank builds one graph."""
    embeddings = inputs.get("inputs_embeds")
    if embeddings is None:
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
    visual = [features[name] for name in ("image", "video")]
    index = torch.cat([arrived.index for arrived in visual])
    first, *deeper = torch.cat([arrived.values for arrived in visual]).split(embeddings.shape[-1], 1)
    levels = [put(torch.zeros_like(embeddings), index, level) for level in deeper]
    return inputs | {"input_ids": None, "inputs_embeds": put(embeddings, index, first), LEVELS: levels}


def put(embeddings: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values [N, C]` in the places of `embeddings [1, T, C]` that `index [N]` says."""
    return embeddings.index_put((torch.zeros_like(index), index), values.to(embeddings.dtype))


def take_levels(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the language model: deepstack's levels as wide as the text, to be added to all of it. Where the model
    expects the mask of their places, it gets the index of the only row of the batch."""
    levels = kwargs.pop(LEVELS, None)
    if levels is not None:
        row = torch.zeros(1, dtype=torch.int64, device=levels[0].device)
        kwargs |= {"visual_pos_masks": row, "deepstack_visual_embeds": levels}
    return args, kwargs


def preprocessor(kind: Any, folder: str | None, published: Mapping[str, Any], **own: int) -> Any:
    """As the folder says, else as published; `own` are sizes that the model itself decides."""
    files = ("preprocessor_config.json", "processor_config.json")
    if folder is not None and any((Path(folder) / file).is_file() for file in files):
        return kind.from_pretrained(folder, **own)
    return kind(**published, **own)
