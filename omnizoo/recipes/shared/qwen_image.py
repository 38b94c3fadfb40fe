"""Image encoders of Qwen models, positions of images, and the insertion of features into the text.

In deepstack models, the features of all levels are concatenated along the width, so that they are sent together.
`merge_visual_features` splits them again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.image import check_aspect, image_size, read_image
from omnizoo.modalities.item import Ids, Inputs, MediaItem, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.models.media.features import Features, insert_features
from omnizoo.recipes.shared.encoders import (
    HALF,
    ImageTowerEncoder,
    boundaries,
    interpolation_inputs,
    load_processor,
    merge_features,
    read_interpolation,
)

LEVELS = "deepstack_levels"  # keyword argument that passes deeper levels through the model
BEGIN, END = "<|vision_start|>", "<|vision_end|>"
KINDS = {"image": 1, "video": 2}  # token type ids of the models
# Sizes for small copies: M-RoPE splits 8 frequencies in the same ratio as the 64 of published models.
SMALL_MROPE = {"rope_parameters": {"mrope_section": [4, 2, 2]}}
# Two levels of deepstack and one more layer, because no layer would attend to features added after the last layer.
SMALL_DEEPSTACK = {
    "text_config": SMALL_MROPE | {"num_hidden_layers": 3},
    "vision_config": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}
SMALL_PARTIAL_ROTARY = {  # sizes for models that rotate only a part of each head
    "text_config": {"rope_parameters": {"partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}},
    "vision_config": {"num_position_embeddings": 16},
}
# One layer with windowed attention, and one with full attention.
SMALL_WINDOWS = {"fullatt_block_indexes": [1], "window_size": 56}


class QwenImageEncoder(ImageTowerEncoder):
    """Image encoder of Qwen2-VL, and base class for later models.

    Images are resized to between `min_pixels` and `max_pixels` pixels. Limits that are None are set by the folder's
    preprocessor config. Patches have rotary positions on two axes.
    """

    packs_items = True
    kind: ClassVar[Any] = Qwen2VLImageProcessorPil
    published: ClassVar[Mapping[str, Any]] = {"size": {"shortest_edge": 4 * 28**2, "longest_edge": 16384 * 28**2}}
    # Inputs of `tower_inputs`: one entry per patch, or one per step (an image has one step, a video several).
    by_patch: ClassVar[tuple[str, ...]] = ("pixels",)
    by_step: ClassVar[tuple[str, ...]] = ("positions",)

    def __init__(
        self, model: PreTrainedModel, folder: str | None, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        super().__init__(model, "model.visual")
        self.vision = vision = model.config.vision_config
        # Side of the square that a placeholder token covers, in pixels.
        self.factor: int = vision.patch_size * vision.spatial_merge_size
        self.processor = load_processor(
            self.kind,
            folder,
            self.published,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )
        max_pixels = max_pixels or self.processor.size.longest_edge
        min_pixels = min_pixels or min(self.processor.size.shortest_edge, max_pixels)
        if min_pixels > max_pixels:
            encoder = type(self).__name__
            raise UserError(
                f"model.modalities: min_pixels {min_pixels} is greater than max_pixels {max_pixels} of {encoder}"
            )
        self.pixels = (min_pixels, max_pixels)

    def measure(self, media: Media) -> MediaSize:
        height, width = image_size(media)
        resized_height, resized_width = self.resized(1, height, width, media)
        return self.size_of(1, resized_height, resized_width)

    def resized(self, frames: int, height: int, width: int, media: Media) -> tuple[int, int]:
        """Return the height and width that the tower receives, after checking the aspect ratio."""
        check_aspect(media, height, width)
        return self.fit(frames, height, width)

    def fit(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width after resizing, as the model's own processor computes them."""
        fitted: tuple[int, int] = smart_resize(height, width, self.factor, *self.pixels)
        return fitted

    def size_of(self, steps: int, height: int, width: int) -> MediaSize:
        """Return the size of an item with `steps` steps of this height and width."""
        rows = height // self.vision.patch_size
        columns = width // self.vision.patch_size
        patches = rows * columns  # patches attend within a step
        placeholders = patches // self.vision.spatial_merge_size**2
        cost = self.flops(patches, placeholders)
        return MediaSize(steps * placeholders, steps * cost, shape=(steps, rows, columns))

    def prepare(self, media: Media) -> Inputs:
        min_pixels, max_pixels = self.pixels
        limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
        out = self.processor(images=read_image(media), size=limits, return_tensors="pt")
        return self.with_positions(out["pixel_values"], out["image_grid_thw"][0])

    def dummy_input(self) -> Inputs:
        merge = self.vision.spatial_merge_size
        values = self.vision.in_channels * self.vision.temporal_patch_size * self.vision.patch_size**2
        return self.with_positions(torch.zeros(merge**2, values), torch.tensor([1, merge, merge]))

    def with_positions(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        """Return the inputs with the positions of patches.

        Everything that depends on the grid is computed here. Otherwise, the tower would read the grid from the device
        with a host sync.
        """
        positions = get_vision_position_ids(grid[None], self.vision.spatial_merge_size).int()
        # [steps, patches, 2]: `tower_inputs` reads both counts from the shape, without a host sync.
        return {"pixels": pixels, "grid": grid, "positions": positions.unflatten(0, (int(grid[0]), -1))}

    def tower_inputs(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """Return the arguments that the tower would otherwise compute from the grids."""
        shapes = [item["positions"].shape for item in items]
        device = items[0]["positions"].device
        return {
            "cu_seqlens": boundaries([(steps * patches, patches) for steps, patches, _ in shapes], device),
            "max_seqlen": max(patches for _, patches, _ in shapes),
            "position_ids": torch.cat([item["positions"].flatten(0, 1) for item in items]),
        }

    def count_placeholders(self, inputs: Inputs) -> int:
        merge: int = self.vision.spatial_merge_size
        return len(inputs["pixels"]) // merge**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        pixels = torch.cat([item["pixels"] for item in items]).type(self.tower.dtype)
        tower_inputs = {"grid_thw": None} | self.tower_inputs(items)
        output = self.tower(pixels, **tower_inputs, return_dict=True)
        return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], 1)


class InterpolatedImageEncoder(QwenImageEncoder):
    """Image encoder of Qwen3-VL and later, with a learned table of positions.

    The position of a patch is interpolated from the four nearest entries of the table.
    """

    published: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 64 * 32**2, "longest_edge": 16384 * 32**2},  # pixels
        **HALF,
    }
    by_patch = ("pixels", "taps", "shares")

    def with_positions(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        merge = self.vision.spatial_merge_size
        interpolation = interpolation_inputs(grid[None], self.tower, spatial_merge_size=merge)
        return super().with_positions(pixels, grid) | interpolation

    def tower_inputs(self, items: Sequence[Inputs]) -> dict[str, Any]:
        return super().tower_inputs(items) | read_interpolation(items)


class WindowedImageEncoder(QwenImageEncoder):
    """Image encoder of Qwen2.5-VL. Most layers attend within windows, so patches are reordered by window."""

    by_step = ("positions", "order", "windows")

    def with_positions(self, pixels: torch.Tensor, grid: torch.Tensor) -> Inputs:
        """Return the inputs of the base class, and the order of patches in windows.

        `order [steps, placeholders]` lists the placeholder tokens of each step, sorted by window. `windows [steps, n]`
        contains the number of patches in each window of a step.
        """
        vision = self.vision
        step = torch.cat([torch.ones_like(grid[:1]), grid[1:]])
        order, ends = get_vision_window_index(
            step[None], vision.spatial_merge_size, vision.window_size, vision.patch_size
        )
        steps = int(grid[0])
        windows = {"order": order.int().repeat(steps, 1), "windows": ends.diff().int().repeat(steps, 1)}
        return super().with_positions(pixels, grid) | windows

    def tower_inputs(self, items: Sequence[Inputs]) -> dict[str, Any]:
        """Add the window order and the window boundaries, concatenated over all steps of all items."""
        start = 0
        orders = []
        device = items[0]["order"].device
        for item in items:
            steps, placeholders = item["order"].shape
            end = start + steps * placeholders
            step_starts = torch.arange(start, end, placeholders, device=device)
            orders.append((item["order"] + step_starts[:, None]).flatten())
            start = end
        lengths = torch.cat([item["windows"].flatten() for item in items])
        window_patches = (self.vision.window_size // self.vision.patch_size) ** 2
        tower_inputs = super().tower_inputs(items)
        return tower_inputs | {
            "window_index": torch.cat(orders),
            "cu_window_seqlens": nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_window_seqlen": min(window_patches, tower_inputs["max_seqlen"]),
        }


def media_shapes(items: Sequence[MediaItem]) -> dict[str, torch.Tensor | None]:
    """Return the sizes of the media items of a sample, as arguments of `get_rope_index` of omni models."""

    def shapes(modality: str) -> torch.Tensor | None:
        sizes = [item.size.shape for item in items if item.port.modality == modality]
        return torch.tensor(sizes) if sizes else None

    videos = shapes("video")
    audio = shapes("audio")
    return {
        "image_grid_thw": shapes("image"),  # [images, 3], in patches
        "video_grid_thw": None if videos is None else videos[:, :3].long(),  # [videos, 3]
        "second_per_grids": None if videos is None else videos[:, 3],  # [videos], seconds per step
        "audio_seqlens": None if audio is None else audio[:, 0],  # [audio clips]
    }


def visual_positions(model: PreTrainedModel, ids: Ids, items: Sequence[MediaItem], **extra_inputs: Any) -> Ids:
    """Return positions `[4, tokens]`: position in the text, time, height and width. The first one separates samples.

    Args:
        extra_inputs: Further arguments of the model's `get_rope_index`.
    """
    shapes = media_shapes(items)
    inner_model: Any = model.get_submodule("model")
    axes, _ = inner_model.get_rope_index(
        torch.from_numpy(ids).long()[None],
        mm_token_type_ids=token_kinds(ids, items),
        image_grid_thw=shapes["image_grid_thw"],
        video_grid_thw=shapes["video_grid_thw"],
        **extra_inputs,
    )
    return with_text_positions(axes).int().numpy()


def token_kinds(ids: Ids, items: Sequence[MediaItem]) -> torch.Tensor:
    """Return `[1, tokens]`: 0 for text, or the value in `KINDS` for placeholder tokens of images and videos."""
    kinds = torch.zeros(1, len(ids), dtype=torch.int64)
    for item in items:
        for first, count in item.spans:
            kinds[0, first : first + count] = KINDS[item.port.modality]
    return kinds


def with_text_positions(axes: torch.Tensor) -> torch.Tensor:
    """Prepend the positions in the text to M-RoPE positions: `[3, 1, tokens]` -> `[4, tokens]`."""
    return torch.cat([torch.arange(axes.shape[-1])[None], axes[:, 0]])


def merge_visual_features(
    model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]
) -> dict[str, Any]:
    """Insert the features of images and videos.

    The first level goes into the embeddings. Deeper levels are passed on to later layers.
    """
    embeddings = inputs.get("inputs_embeds")
    if embeddings is None:
        embeddings = model.get_input_embeddings()(inputs["input_ids"])

    visual = [features[name] for name in KINDS]
    index = torch.cat([media_features.index for media_features in visual])
    values = torch.cat([media_features.values for media_features in visual])
    first, *deeper = (Features(level, index) for level in values.split(embeddings.shape[-1], 1))
    levels = [insert_features(torch.zeros_like(embeddings), level) for level in deeper]
    merged = inputs | {"input_ids": None, "inputs_embeds": insert_features(embeddings, first)}
    if levels:
        merged[LEVELS] = levels
    return merged


def merge_audio_visual_features(
    model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]
) -> dict[str, Any]:
    """Insert the features of audio, images and videos."""
    with_audio = merge_features(model, inputs, {"audio": features["audio"]})
    return merge_visual_features(model, with_audio, features)


def deepstack_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the language model, with deepstack features for every token of the sequence.

    These features are added to all tokens, not only to placeholder tokens. In place of the usual mask, the model
    therefore receives the index of a row of the batch. The batch has one row, so the index selects all tokens.
    """
    inputs = dict(inputs)
    levels = inputs.pop(LEVELS, None)
    if levels is not None:
        row = torch.zeros(1, dtype=torch.int64, device=levels[0].device)
        inputs |= {"visual_pos_masks": row, "deepstack_visual_embeds": levels}
    return inputs
