"""How pictures enter Kimi K2.5 and later: never enlarged, padded to whole squares, patches of any number.

Nothing is read back from the device: what the tower would work out from grids is made before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import Inputs, Modality, Size
from omnizoo.modalities.files import picture_size
from omnizoo.modalities.item import Media
from omnizoo.modalities.tally import Tally
from omnizoo.modalities.tower import Work
from omnizoo.recipes.qwen_towers import SHARE, boundaries
from omnizoo.recipes.tensor_pictures import BICUBIC, TensorPictures
from omnizoo.recipes.vision_towers import PatchTower, build_vision

BEGIN, CONTENT, END = MARKS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
PUBLISHED = {"max_patches": 16384, "resample": BICUBIC, "size": {"max_height": 512, "max_width": 512}}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class NativeTower(PatchTower):
    """Pictures of at most `max_patches` patches; by default what the folder's preprocessor says."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_patches: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.mm_projector")
        config: Any = model.config.vision_config
        self.patch: int = config.patch_size
        self.merge: tuple[int, int] = tuple(config.merge_kernel_size)  # patches of a place: down, across
        self.processor = TensorPictures(folder, PUBLISHED | HALF, max_patches=max_patches)
        side = self.processor.told["size"].get("max_height")
        if not isinstance(side, int) or side < 1:
            raise UserError(f"{folder}: preprocessor_config.json: size has no max_height, which counts patches")
        self.longest = side * self.patch

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Its size, scaled down where it has too many patches, in all or along a side."""
        most, longest = self.processor.told["max_patches"], self.longest
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Places down and across: what they cover beyond the picture is black."""
        sides = zip(self.fitted(height, width), self.merge, strict=True)
        down, across = (math.ceil(side / (merge * self.patch)) for side, merge in sides)
        return down, across

    def measure(self, media: Media) -> Size:
        places = math.prod(self.grid(*picture_size(media)))
        patches = places * math.prod(self.merge)
        return self.size_of(patches, places, (f"{BEGIN}image{CONTENT}", places, END))

    def tower_work(self) -> Work:
        """Its table of positions is looked up, not multiplied with."""
        work = Work.of(self.tower)
        table = Tally(work.trained)
        table.multiply(self.tower.patch_embed.pos_emb.position_embeddings, 1)
        return replace(work, per_token=work.per_token - table.flops)

    def prepare(self, media: Media) -> Inputs:
        pixels, patch = self.processor.read(media), self.patch
        (down, across), (height, width) = self.grid(*pixels.shape[1:]), self.fitted(*pixels.shape[1:])
        rows, columns = down * self.merge[0], across * self.merge[1]
        shown = self.processor.resize(pixels, height, width)
        values = self.processor.values(pad(shown, (0, columns * patch - width, 0, rows * patch - height)))
        patches = values.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return self.with_places(patches, rows, columns)

    def blank(self) -> Inputs:
        rows, columns = self.merge
        return self.with_places(torch.zeros(rows * columns, 3, self.patch, self.patch), rows, columns)

    def with_places(self, pixels: torch.Tensor, rows: int, columns: int) -> Inputs:
        """`order [places, patches of each]` says which patches become a place."""
        grid, table = torch.tensor([[1, rows, columns]]), self.tower.patch_embed.pos_emb
        taps, shares = get_vision_interpolation_indices_and_weights(
            grid, table.num_grid_per_side, table.interpolation_mode, table.interpolation_align_corners
        )
        order = torch.arange(rows * columns).view(-1, self.merge[0], columns // self.merge[1], self.merge[1])
        return {
            "pixels": pixels,
            "positions": get_vision_position_ids(grid, 1).int(),
            "taps": taps.int(),
            # Whole numbers, for floats come in the precision of the computation.
            "shares": (shares.double() * SHARE).long(),
            "order": order.transpose(1, 2).flatten(2).flatten(0, 1).int(),
        }

    def places(self, inputs: Inputs) -> int:
        return len(inputs["order"])

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        lengths, device = [len(item["pixels"]) for item in items], items[0]["pixels"].device
        all_of = {name: torch.cat([item[name] for item in items]) for name in items[0] if name != "order"}
        starts = [sum(lengths[:number]) for number in range(len(items))]
        order = torch.cat([item["order"] + start for item, start in zip(items, starts, strict=True)])
        told = {
            "interp_indices": all_of["taps"],
            "interp_weights": all_of["shares"].to(torch.float32) / SHARE,
            "position_ids": all_of["positions"],
            "frame_index": torch.zeros(sum(lengths), dtype=torch.int64, device=device),  # a picture is no clip
            "cu_seqlens": boundaries([(length, length) for length in lengths], device),
            "max_seqlen": max(lengths),
            "temporal_merge_index": order[:, None],
        }
        out = self.tower(all_of["pixels"], grid_thw=None, **told, return_dict=True).pooler_output
        features: torch.Tensor = self.projector(out).squeeze(1)
        return features


def modalities(
    model: PreTrainedModel, folder: str | None, options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Modality]:
    """The published chat template breaks the line after a picture."""
    built = build_vision({"image": (NativeTower, "<|media_pad|>", MARKS)}, model, folder, options)
    return {name: replace(modality, in_chat="{item}\n") for name, modality in built.items()}
