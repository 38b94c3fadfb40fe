"""Image encoder of MiniCPM-V 4.7: a downscaled copy of the whole image, and slices of the image.

Crops do not attend to each other in the tower. Its first layers process all patches; the tower then merges them, and
later layers process a quarter of them.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.vision_utils import get_vision_nearest_position_ids

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.flop_count import FlopCounter
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import check_positive, load_processor
from omnizoo.recipes.shared.image_encoders import PatchEncoder

BEGIN, END, SLICE, SLICE_END = "<image>", "</image>", "<slice>", "</slice>"
MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


class SlicedEncoder(PatchEncoder):
    """Image encoder of MiniCPM-V.

    An image becomes one downscaled copy and at most `max_slices` slices, each of about `resolution` x `resolution`
    pixels. Options that are None are set by the folder's preprocessor config.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str | None,
        max_slices: int | None = None,
        resolution: int | None = None,
    ) -> None:
        super().__init__(model, "model.vision_tower", "model.merger")
        config: Any = model.config
        missing = [name for name in (*MARKS, "image_token_id") if getattr(config, name) is None]
        if missing:
            raise UserError(f"model.config.{missing[0]}: not set, but minicpmv4_7 needs it to compute positions")
        if config.merger_times != 1:
            raise UserError(f"model.config.merger_times: {config.merger_times} is not supported. Use 1.")
        self.patch: int = config.vision_config.patch_size
        self.merges_in_tower = config.downsample_mode != "4x"  # whether patches are also merged inside the tower
        check_positive("model.modalities.image.encoder.options", max_slices=max_slices, resolution=resolution)
        self.processor = load_processor(
            MiniCPMV4_6ImageProcessorPil,
            folder,
            {},
            patch_size=self.patch,
            downsample_mode=config.downsample_mode,
            max_slice_nums=max_slices,
            scale_resolution=resolution,
        )

    def crops(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Return three (rows, columns) pairs for an image.

        These are the slices (0 if there are none), the patches of the downscaled copy, and the patches of a slice.
        """
        processor = self.processor
        resolution = processor.scale_resolution
        mode = processor.downsample_mode
        grid = processor.get_sliced_grid(size, processor.max_slice_nums, resolution) if processor.slice_mode else None
        height, width = processor.find_best_resize(size, resolution, self.patch, mode, allow_upscale=grid is None)
        copy = (height // self.patch, width // self.patch)
        if not grid:
            return (0, 0), copy, (0, 0)

        rows, columns = grid
        height, width = processor.get_refine_size(size, grid, resolution, self.patch, mode, allow_upscale=True)
        return (rows, columns), copy, (height // rows // self.patch, width // columns // self.patch)

    def measure(self, media: Media) -> MediaSize:
        (rows, columns), copy, slice_ = self.crops(image_size(media))
        num_slices = rows * columns
        copy_patches = math.prod(copy)
        slice_patches = math.prod(slice_)
        copy_placeholders = copy_patches // self.patches_per_placeholder
        slice_placeholders = slice_patches // self.patches_per_placeholder

        layout: list[str | int] = [BEGIN, copy_placeholders, END]
        for row in range(rows):
            if row:
                layout.append("\n")
            layout += [SLICE, slice_placeholders, SLICE_END] * columns
        return MediaSize(
            copy_placeholders + num_slices * slice_placeholders,
            cost=self.cost(copy_patches) + num_slices * self.cost(slice_patches),
            layout=tuple(layout),
            shape=(num_slices, *copy, *slice_),
        )

    @property
    def patches_per_placeholder(self) -> int:
        """Number of patches that are merged into one placeholder token."""
        return 16 if self.merges_in_tower else 4

    def cost(self, patches: int) -> float:
        """Return the FLOPs of a crop."""
        (before, before_pair), (after, after_pair) = self.per_patch
        return patches * (before + before_pair * patches) + patches / 4 * (after + after_pair * patches / 4)

    @cached_property
    def per_patch(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """FLOPs per patch and per pair of patches, before and after the merge in the tower."""
        tower = self.tower
        counter = FlopCounter()
        stages = []  # FLOPs per patch and per pair
        before = tower.config.insert_layer_id + 1 if self.merges_in_tower else len(tower.encoder.layers)
        counter.run(tower.embeddings.patch_embedding, 1)
        for layers in (tower.encoder.layers[:before], tower.encoder.layers[before:]):
            counter.run(layers, 1)
            pair = FlopCounter(counter.trained)
            pair.attend(len(layers), tower.config.hidden_size)
            stages.append((counter.flops, pair.flops))
            counter = FlopCounter(counter.trained)
            if self.merges_in_tower and len(stages) == 1:
                counter.run(tower.vit_merger.self_attn, 4)
                counter.attend(16, tower.config.hidden_size)
                counter.run(tower.vit_merger.linear_1, 1)
                counter.run(tower.vit_merger.linear_2, 1)
        counter.run(self.projector, 1 / 4 if self.merges_in_tower else 1)
        before_merge, (per_patch, per_pair) = stages
        return before_merge, (per_patch + counter.flops, per_pair)

    def prepare(self, media: Media) -> Inputs:
        """Return patches of the downscaled copy `[rows, columns, ...]` and of slices `[slices, rows, columns, ...]`."""
        out = self.processor(images=read_image(media), return_tensors="pt")
        sizes: list[list[int]] = out["target_sizes"].tolist()
        patches = out["pixel_values"][0].unflatten(2, (-1, self.patch)).permute(2, 0, 1, 3)
        copy_size = sizes[0]
        slice_size = sizes[-1]
        num_copy_patches = math.prod(copy_size)
        copy, slices = patches.split([num_copy_patches, len(patches) - num_copy_patches])
        crops = {
            "small": copy.unflatten(0, copy_size),
            "slices": slices.reshape(-1, *slice_size, *slices.shape[1:]),
        }
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in crops.items()}

    def dummy_input(self) -> Inputs:
        small = torch.zeros(4, 4, 3, self.patch, self.patch)
        return {"small": small, "slices": small[None][:0]}

    def count_placeholders(self, inputs: Inputs) -> int:
        patches = sum(value.shape[:-3].numel() for value in inputs.values())
        return patches // self.patches_per_placeholder

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode images.

        Sizes stay on the host, where the tower reads them. Tensors that the tower would compute from these sizes are
        computed here and copied to the device without blocking.
        """
        crops = [crop for item in items for crop in (item["small"], *item["slices"])]
        sizes = torch.tensor([crop.shape[:2] for crop in crops], dtype=torch.int32)
        pixels = torch.cat([crop.flatten(0, 1) for crop in crops]).permute(1, 2, 0, 3).flatten(2)[None]

        host_tensors = {
            "position_ids": get_vision_nearest_position_ids(sizes, self.tower.embeddings.num_patches_per_side)
        }
        if self.merges_in_tower:
            window_index, window_ends, _ = self.tower.vit_merger.get_window_index(sizes)
            host_tensors |= {"window_index": window_index, "cu_window_seqlens": window_ends}
        tower_inputs = {name: value.to(pixels.device, non_blocking=True) for name, value in host_tensors.items()}

        hidden = self.tower(
            pixels,
            target_sizes=sizes,
            **tower_inputs,
            use_vit_merger=self.merges_in_tower,
            max_seqlen=max(crop.shape[:2].numel() for crop in crops),
            return_dict=True,
        ).last_hidden_state
        merged: list[list[int]] = (sizes // 2 if self.merges_in_tower else sizes).tolist()
        return torch.cat(self.projector(hidden, merged))
