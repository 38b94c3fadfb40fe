"""How pictures enter MiniCPM-V 4.7: a small one of the whole, and slices of it. Crops do not see each other in the
tower, whose layers after the first few see a quarter of the patches."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.vision_utils import get_vision_nearest_position_ids

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Size
from omnizoo.modalities.files import picture_size, read_picture
from omnizoo.modalities.item import Media
from omnizoo.modalities.tally import Tally
from omnizoo.recipes.vision_towers import PatchTower, image_processor

BEGIN, END, SLICE, SLICE_END = "<image>", "</image>", "<slice>", "</slice>"
MARKS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")


class SlicedTower(PatchTower):
    """Pictures as one small one and at most `max_slices` slices, each of about `resolution` x `resolution` pixels; by
    default what the folder's preprocessor says."""

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
        self.twice = config.downsample_mode != "4x"  # merged in the midst of the tower, too
        for name, value in {"max_slices": max_slices, "resolution": resolution}.items():
            if value is not None and not value > 0:
                raise UserError(f"model.modalities.image.encoder.options.{name}: {value!r} is not above 0")
        own = {"patch_size": self.patch, "downsample_mode": config.downsample_mode}
        own |= {"max_slice_nums": max_slices, "scale_resolution": resolution}
        self.processor = image_processor(MiniCPMV4_6ImageProcessorPil, folder, {}, **own)

    def crops(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of a picture: rows and columns of slices (none: 0), then those of patches in the small one and in a slice."""
        own, edge = self.processor, (self.processor.scale_resolution, self.patch, self.processor.downsample_mode)
        grid = own.get_sliced_grid(size, own.max_slice_nums, own.scale_resolution) if own.slice_mode else None
        height, width = own.find_best_resize(size, *edge, allow_upscale=grid is None)
        rows, columns = grid or (0, 0)
        down, across = own.get_refine_size(size, grid, *edge, allow_upscale=True) if grid else (0, 0)
        small = height // self.patch, width // self.patch
        return (rows, columns), small, (down // max(rows, 1) // self.patch, across // max(columns, 1) // self.patch)

    def measure(self, media: Media) -> Size:
        (rows, columns), small, each = self.crops(picture_size(media))
        most = 16 if self.twice else 4  # patches of a place
        first, other = small[0] * small[1] // most, each[0] * each[1] // most
        row = (SLICE, other, SLICE_END) * columns
        layout = (BEGIN, first, END, *(part for n in range(rows) for part in (*(("\n",) if n else ()), *row)))
        cost = self.cost(small[0] * small[1]) + rows * columns * self.cost(each[0] * each[1])
        return Size(first + rows * columns * other, cost, layout=layout, shape=(rows * columns, *small, *each))

    def cost(self, patches: int) -> float:
        (token, pair), (later, later_pair) = self.per_patch
        return patches * (token + pair * patches) + patches / 4 * (later + later_pair * patches / 4)

    @cached_property
    def per_patch(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """FLOPs per patch and per pair of them, before they are merged in the tower and afterwards."""
        tower, tally, found = self.tower, Tally(), []
        before = tower.config.insert_layer_id + 1 if self.twice else len(tower.encoder.layers)
        tally.run(tower.embeddings.patch_embedding, 1)
        for layers in (tower.encoder.layers[:before], tower.encoder.layers[before:]):
            tally.run(layers, 1)
            pair = Tally(tally.trained)
            pair.attend(len(layers), tower.config.hidden_size)
            found.append((tally.flops, pair.flops))
            tally = Tally(tally.trained)
            if self.twice and len(found) == 1:
                tally.run(tower.vit_merger.self_attn, 4)
                tally.attend(16, tower.config.hidden_size)
                tally.run(tower.vit_merger.linear_1, 1)
                tally.run(tower.vit_merger.linear_2, 1)
        tally.run(self.projector, 1 / 4 if self.twice else 1)
        return found[0], (found[1][0] + tally.flops, found[1][1])

    def prepare(self, media: Media) -> Inputs:
        """Patches of the small picture `[rows, columns, ...]` and of slices `[slices, rows, columns, ...]`."""
        out = self.processor(images=read_picture(media), return_tensors="pt")
        sizes: list[list[int]] = out["target_sizes"].tolist()
        patches = out["pixel_values"][0].unflatten(2, (-1, self.patch)).permute(2, 0, 1, 3)
        small, rest = patches.split([sizes[0][0] * sizes[0][1], len(patches) - sizes[0][0] * sizes[0][1]])
        kept = {"small": small.unflatten(0, sizes[0]), "slices": rest.reshape(-1, *sizes[-1], *rest.shape[1:])}
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in kept.items()}

    def blank(self) -> Inputs:
        small = torch.zeros(4, 4, 3, self.patch, self.patch)
        return {"small": small, "slices": small[None][:0]}

    def places(self, inputs: Inputs) -> int:
        return sum(value.shape[:-3].numel() for value in inputs.values()) // (16 if self.twice else 4)

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Sizes stay on the host, where the tower asks for them; what it makes of them is made here and sent ahead."""
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
