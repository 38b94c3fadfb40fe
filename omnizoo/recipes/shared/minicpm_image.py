"""Encoder for images of MiniCPM-V 4.7: a downscaled copy of the whole image, and slices of it.

Crops do not attend to each other in the tower. Its first layers process all patches; the tower then merges them, and
later layers process a quarter of them.
"""

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
from omnizoo.recipes.shared.image_encoders import PatchTower

BEGIN, END, SLICE, SLICE_END = "<image>", "</image>", "<slice>", "</slice>"
MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


class SlicedTower(PatchTower):
    """Image encoder of MiniCPM-V.

    An image becomes one downscaled copy and at most `max_slices` slices, each of about `resolution` x `resolution`
    pixels. None uses the setting of the folder's preprocessor.
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
        absent = [name for name in (*MARKS, "image_token_id") if getattr(config, name) is None]
        if absent or config.merger_times != 1:
            what = f"{absent[0]} is missing, by which positions are found" if absent else "merger_times has to be 1"
            raise UserError(f"the config of minicpmv4_7: {what}")
        self.patch: int = config.vision_config.patch_size
        self.twice = config.downsample_mode != "4x"  # whether patches are also merged inside the tower
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
        own, edge = self.processor, (self.processor.scale_resolution, self.patch, self.processor.downsample_mode)
        grid = own.get_sliced_grid(size, own.max_slice_nums, own.scale_resolution) if own.slice_mode else None
        height, width = own.find_best_resize(size, *edge, allow_upscale=grid is None)
        rows, columns = grid or (0, 0)
        down, across = own.get_refine_size(size, grid, *edge, allow_upscale=True) if grid else (0, 0)
        small = height // self.patch, width // self.patch
        return (rows, columns), small, (down // max(rows, 1) // self.patch, across // max(columns, 1) // self.patch)

    def measure(self, media: Media) -> MediaSize:
        (rows, columns), small, each = self.crops(image_size(media))
        most = 16 if self.twice else 4  # patches per placeholder token
        first, other = small[0] * small[1] // most, each[0] * each[1] // most
        row = (SLICE, other, SLICE_END) * columns
        layout = (BEGIN, first, END, *(part for n in range(rows) for part in (*(("\n",) if n else ()), *row)))
        cost = self.cost(small[0] * small[1]) + rows * columns * self.cost(each[0] * each[1])
        return MediaSize(first + rows * columns * other, cost, layout=layout, shape=(rows * columns, *small, *each))

    def cost(self, patches: int) -> float:
        (token, pair), (later, later_pair) = self.per_patch
        return patches * (token + pair * patches) + patches / 4 * (later + later_pair * patches / 4)

    @cached_property
    def per_patch(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """FLOPs per patch and per pair of patches, before and after the merge in the tower."""
        tower, tally, found = self.tower, FlopCounter(), []
        before = tower.config.insert_layer_id + 1 if self.twice else len(tower.encoder.layers)
        tally.run(tower.embeddings.patch_embedding, 1)
        for layers in (tower.encoder.layers[:before], tower.encoder.layers[before:]):
            tally.run(layers, 1)
            pair = FlopCounter(tally.trained)
            pair.attend(len(layers), tower.config.hidden_size)
            found.append((tally.flops, pair.flops))
            tally = FlopCounter(tally.trained)
            if self.twice and len(found) == 1:
                tally.run(tower.vit_merger.self_attn, 4)
                tally.attend(16, tower.config.hidden_size)
                tally.run(tower.vit_merger.linear_1, 1)
                tally.run(tower.vit_merger.linear_2, 1)
        tally.run(self.projector, 1 / 4 if self.twice else 1)
        return found[0], (found[1][0] + tally.flops, found[1][1])

    def prepare(self, media: Media) -> Inputs:
        """Return patches of the downscaled copy `[rows, columns, ...]` and of slices `[slices, rows, columns, ...]`."""
        out = self.processor(images=read_image(media), return_tensors="pt")
        sizes: list[list[int]] = out["target_sizes"].tolist()
        patches = out["pixel_values"][0].unflatten(2, (-1, self.patch)).permute(2, 0, 1, 3)
        small, rest = patches.split([sizes[0][0] * sizes[0][1], len(patches) - sizes[0][0] * sizes[0][1]])
        kept = {"small": small.unflatten(0, sizes[0]), "slices": rest.reshape(-1, *sizes[-1], *rest.shape[1:])}
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in kept.items()}

    def dummy_input(self) -> Inputs:
        small = torch.zeros(4, 4, 3, self.patch, self.patch)
        return {"small": small, "slices": small[None][:0]}

    def count_placeholders(self, inputs: Inputs) -> int:
        return sum(value.shape[:-3].numel() for value in inputs.values()) // (16 if self.twice else 4)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Encode images.

        Sizes stay on the host, where the tower reads them. Tensors that the tower would compute from them are computed
        here and copied to the device without blocking.
        """
        crops = [crop for item in items for crop in (item["small"], *item["slices"])]
        sizes = torch.tensor([crop.shape[:2] for crop in crops], dtype=torch.int32)
        pixels = torch.cat([crop.flatten(0, 1) for crop in crops]).permute(1, 2, 0, 3).flatten(2)[None]
        made = {"position_ids": get_vision_nearest_position_ids(sizes, self.tower.embeddings.num_patches_per_side)}
        if self.twice:
            made["window_index"], made["cu_window_seqlens"], _ = self.tower.vit_merger.get_window_index(sizes)
        told: dict[str, Any] = {name: value.to(pixels.device, non_blocking=True) for name, value in made.items()}
        told |= {"use_vit_merger": self.twice, "max_seqlen": max(crop.shape[:2].numel() for crop in crops)}
        hidden = self.tower(pixels, target_sizes=sizes, **told, return_dict=True).last_hidden_state
        merged: list[list[int]] = (sizes // 2 if self.twice else sizes).tolist()
        return torch.cat(self.projector(hidden, merged))
