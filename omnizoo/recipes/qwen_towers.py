"""How pictures enter the published Qwen models: their own towers as encoders, their own merge into the text.

An encoder here has no weights: it calls the model it was made for. Features of deepstack models carry all their levels
side by side, so that they travel once; `enter_visual` takes them apart again. Clips are in qwen_clips.py, sound is in
qwen_sound.py.

Nothing is read back from the device: what a tower needs to know of sizes is made before, or told by shapes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.base import Encoder, Inputs, Item, Modality, Size
from omnizoo.modalities.files import PICTURE_OPTIONS, picture_size, read_picture
from omnizoo.modalities.image import thumbnail
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.modalities.tower import Work, check_settings
from omnizoo.models.artefact import read_json
from omnizoo.models.hf_private import PACKED, attend_packed, attention_name, language_model
from omnizoo.models.media_batch import Features
from omnizoo.models.media_model import Ids

log = logging.getLogger(__name__)
SHARE = 2**62  # what a weight of 1 is in whole numbers
LEVELS = "deepstack_levels"  # the keyword that carries them through the model
BEGIN, END = "<|vision_start|>", "<|vision_end|>"
KINDS = {"image": 1, "video": 2}  # as models tell their tokens apart
# For `omnizoo verify`: M-RoPE shares 8 frequencies as the published share 64.
SHRINK_TEXT = {"rope_parameters": {"mrope_section": [4, 2, 2]}}
# Two levels of deepstack and a layer more (what is added after the last one, nobody attends to).
SHRINK = {
    "text_config": SHRINK_TEXT | {"num_hidden_layers": 3},
    "vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}
SHRINK_PARTIAL = {  # of heads that turn by part of their width
    "text_config": {"rope_parameters": {"partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}},
    "vision_config": {"num_position_embeddings": 16},
}
# One layer that attends in windows, and one that sees all of a picture.
SHRINK_WINDOWS = {"fullatt_block_indexes": [1], "window_size": 56}


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
    """Images of `min_pixels` to `max_pixels`; by default what the folder's preprocessor says. Patches have a place on
    two axes, which turns their queries and keys: Qwen2-VL."""

    item_options = PICTURE_OPTIONS
    kind: ClassVar[Any] = Qwen2VLImageProcessorPil
    published: ClassVar[Mapping[str, Any]] = {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 16384 * 28**2}}
    # What `told` reads: of each patch, and of each step (a picture is one, a clip has several).
    by_patch: ClassVar[tuple[str, ...]] = ("pixels",)
    by_step: ClassVar[tuple[str, ...]] = ("positions",)

    def __init__(
        self, model: PreTrainedModel, folder: str | None, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        super().__init__(model, "model.visual")
        self.vision = vision = model.config.vision_config
        self.factor: int = vision.patch_size * vision.spatial_merge_size  # pixels along the edge of one place's square
        self.processor = preprocessor(
            self.kind,
            folder,
            self.published,
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
        positions = get_vision_position_ids(grid[None], self.vision.spatial_merge_size).int()
        # [steps, patches, 2]: the shape tells both
        return {"pixels": pixels, "grid": grid, "positions": positions.unflatten(0, (int(grid[0]), -1))}

    def told(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """What the tower would work out from the grids."""
        shapes = [item["positions"].shape for item in items]
        device = items[0]["positions"].device
        return {
            "cu_seqlens": boundaries([(steps * patches, patches) for steps, patches, _ in shapes], device),
            "max_seqlen": max(patches for _, patches, _ in shapes),
            "position_ids": torch.cat([item["positions"].flatten(0, 1) for item in items]),
        }

    def preview(self, media: Media) -> str:
        return thumbnail(read_picture(media), media.name)

    def places(self, inputs: Inputs) -> int:
        merge: int = self.vision.spatial_merge_size
        return len(inputs["pixels"]) // merge**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        pixels = torch.cat([item["pixels"] for item in items]).type(self.tower.dtype)
        out = self.tower(pixels, **{"grid_thw": None} | self.told(items), return_dict=True)
        return torch.cat([out.pooler_output, *getattr(out, "deepstack_features", ())], 1)


class InterpolatedTower(ImageTower):
    """With a learned table of positions, of which a patch takes the mean of its four nearest: Qwen3-VL and later."""

    published: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 64 * 32**2, "longest_edge": 16384 * 32**2},  # pixels
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    by_patch = ("pixels", "taps", "shares")

    def with_places(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        tower = self.tower
        taps, shares = get_vision_interpolation_indices_and_weights(
            grid[None],
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=self.vision.spatial_merge_size,
        )
        # Whole numbers, for floats come in the precision of the computation; none of an fp32's digits is lost.
        return super().with_places(pixels, grid) | {"taps": taps.int(), "shares": (shares.double() * SHARE).long()}

    def told(self, items: Sequence[Inputs]) -> dict[str, Any]:
        taps, shares = (torch.cat([item[name] for item in items]) for name in ("taps", "shares"))
        return super().told(items) | {"interp_indices": taps, "interp_weights": shares.to(torch.float32) / SHARE}


class WindowedTower(ImageTower):
    """Most layers attend in windows, for which places stand in another order: Qwen2.5-VL."""

    by_step = ("positions", "order", "windows")

    def with_places(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        """`order [steps, places]` of a step's places, `windows [steps, n]` patches in each of its windows."""
        vision = self.vision
        step = torch.cat([torch.ones_like(grid[:1]), grid[1:]])
        order, ends = get_vision_window_index(
            step[None], vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        steps = int(grid[0])
        each = {"order": order.int().repeat(steps, 1), "windows": ends.diff().int().repeat(steps, 1)}
        return super().with_places(pixels, grid) | each

    def told(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """Steps are counted through, and so are the windows of all."""
        start, orders, device = 0, [], items[0]["order"].device
        for item in items:
            steps, places = item["order"].shape
            firsts = torch.arange(start, start + steps * places, places, device=device)
            orders.append((item["order"] + firsts[:, None]).flatten())
            start += steps * places
        lengths = torch.cat([item["windows"].flatten() for item in items])
        most = (self.vision.window_size // self.vision.patch_size) ** 2
        told = super().told(items)
        return told | {
            "window_index": torch.cat(orders),
            "cu_window_seqlens": nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_window_seqlen": min(most, told["max_seqlen"]),
        }


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
    built: dict[str, Modality] = {}
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


def visual_positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item], **told: Any) -> Ids:
    """`[4, L]`: in the text, by which samples are told apart; then time, height and width. `told`: what else the
    model's own rule takes."""
    kinds = torch.zeros(1, len(ids), dtype=torch.int64)
    for item in items:
        for first, count in item.spans:
            kinds[0, first : first + count] = KINDS[item.port.modality]
    clips = shapes_of(items, "video")
    core: Any = model.get_submodule("model")
    axes, _ = core.get_rope_index(
        torch.from_numpy(ids).long()[None],
        mm_token_type_ids=kinds,
        image_grid_thw=shapes_of(items, "image"),
        video_grid_thw=None if clips is None else clips[:, :3].long(),
        **told,
    )
    return torch.cat([torch.arange(len(ids))[None], axes[:, 0]]).int().numpy()


def enter_visual(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    """Put features among the embeddings, by index: the model would pick their places by masks, which the host has to
    wait for. Always both kinds, so that every rank builds one graph."""
    embeddings = inputs.get("inputs_embeds")
    if embeddings is None:
        embeddings = model.get_input_embeddings()(inputs["input_ids"])
    visual = [features[name] for name in KINDS]
    index = torch.cat([arrived.index for arrived in visual])
    first, *deeper = torch.cat([arrived.values for arrived in visual]).split(embeddings.shape[-1], 1)
    levels = [put(torch.zeros_like(embeddings), index, level) for level in deeper]
    entered = inputs | {"input_ids": None, "inputs_embeds": put(embeddings, index, first)}
    return entered | {LEVELS: levels} if levels else entered


def enter_with_sound(
    model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]
) -> dict[str, Any]:
    sound = features["audio"]
    embeddings = put(model.get_input_embeddings()(inputs["input_ids"]), sound.index, sound.values)
    return enter_visual(model, inputs | {"inputs_embeds": embeddings}, features)


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


def preprocessor(kind: Any, folder: str | None, published: Mapping[str, Any], **own: Any) -> Any:
    """As the folder says, else as published; `own` are sizes that the model itself decides."""
    files = [Path(folder or "") / name for name in ("preprocessor_config.json", "processor_config.json")]
    if folder is not None and (found := [file for file in files if file.is_file()]):
        for file in found:
            read_json(file)  # which says in a line what is wrong with it
        # `from_pretrained(folder, **own)` leaves out what of `own` the file does not have
        read = getattr(kind, "get_feature_extractor_dict", None) or kind.get_image_processor_dict
        try:
            made = kind.from_dict(read(folder)[0] | own)
        except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
            raise UserError(f"{found[0]} does not describe a {kind.__name__}: {first_line(error)}") from error
        check_settings(str(found[0]), made)
        return made
    if folder is not None and any(Path(folder).glob("*.safetensors")):  # published weights, or an export
        log.warning("%s has no preprocessor_config.json: its media are prepared as its family is published", folder)
    return kind(**published, **own)
