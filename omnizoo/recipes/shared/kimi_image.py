"""Image encoder of Kimi K2.5 and later.

Images are never enlarged. They are padded to a whole number of placeholder tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.vision_utils import get_vision_position_ids

from omnizoo.config.errors import UserError
from omnizoo.modalities.encoders.tower import TowerFlops
from omnizoo.modalities.files.image import image_size
from omnizoo.modalities.flop_count import FlopCounter
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.recipes.shared.encoders import HALF, boundaries, interpolation_inputs, read_interpolation
from omnizoo.recipes.shared.image_encoders import PatchEncoder
from omnizoo.recipes.shared.tensor_images import BICUBIC, TensorImageProcessor

BEGIN, CONTENT, END = MARKS = ("<|media_begin|>", "<|media_content|>", "<|media_end|>")
PUBLISHED = {"max_patches": 16384, "resample": BICUBIC, "size": {"max_height": 512, "max_width": 512}}


class NativeSizeEncoder(PatchEncoder):
    """Image encoder of Kimi K2.5.

    An image has at most `max_patches` patches. If `max_patches` is None, the folder's preprocessor config sets the
    limit.
    """

    def __init__(self, model: PreTrainedModel, folder: str | None, max_patches: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.mm_projector")
        config: Any = model.config.vision_config
        self.patch: int = config.patch_size
        self.merge: tuple[int, int] = tuple(config.merge_kernel_size)  # patches of a placeholder token: rows, columns
        self.processor = TensorImageProcessor(folder, PUBLISHED | HALF, max_patches=max_patches)
        side = self.processor.settings["size"].get("max_height")
        if not isinstance(side, int) or side < 1:
            raise UserError(
                f"{folder}/preprocessor_config.json: size.max_height is {side!r}; expected a number of patches"
            )
        self.max_edge = side * self.patch  # pixels

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of an image, scaled down if it has too many patches in total or along a side."""
        max_patches = self.processor.settings["max_patches"]
        max_edge: int = self.max_edge
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        scale = min(1.0, math.sqrt(max_patches / patches), self.max_edge / height, self.max_edge / width)

        def scaled(side: int) -> int:
            return min(max(1, int(side * scale)), max_edge)

        return scaled(height), scaled(width)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of placeholder tokens. The area beyond the image is black."""
        fitted_height, fitted_width = self.fitted(height, width)
        merged_rows, merged_columns = self.merge
        rows = math.ceil(fitted_height / (merged_rows * self.patch))
        columns = math.ceil(fitted_width / (merged_columns * self.patch))
        return rows, columns

    def measure(self, media: Media) -> MediaSize:
        height, width = image_size(media)
        placeholders = math.prod(self.grid(height, width))
        patches = placeholders * math.prod(self.merge)
        return self.size_of(patches, placeholders, (f"{BEGIN}image{CONTENT}", placeholders, END))

    def tower_work(self) -> TowerFlops:
        """Return the FLOPs of the tower. Its position table is a lookup, not a matmul."""
        work = TowerFlops.of(self.tower)
        table = FlopCounter(work.trained)
        table.multiply(self.tower.patch_embed.pos_emb.position_embeddings, 1)
        return replace(work, per_token=work.per_token - table.flops)

    def prepare(self, media: Media) -> Inputs:
        pixels = self.processor.read(media)
        height, width = pixels.shape[1:]
        size = self.fitted(height, width)
        placeholder_rows, placeholder_columns = self.grid(height, width)
        rows = placeholder_rows * self.merge[0]
        columns = placeholder_columns * self.merge[1]
        patches = self.processor.tiles(pixels, size, (rows, columns), self.patch)
        return self.with_positions(self.processor.values(patches), rows, columns)

    def dummy_input(self) -> Inputs:
        rows, columns = self.merge
        return self.with_positions(torch.zeros(rows * columns, 3, self.patch, self.patch), rows, columns)

    def with_positions(self, pixels: torch.Tensor, rows: int, columns: int) -> Inputs:
        """Return the inputs with positions. `order [placeholders, patches]` lists the patches of each placeholder
        token."""
        grid = torch.tensor([[1, rows, columns]])
        table = self.tower.patch_embed.pos_emb
        order = torch.arange(rows * columns).view(-1, self.merge[0], columns // self.merge[1], self.merge[1])
        return {
            "pixels": pixels,
            "positions": get_vision_position_ids(grid, 1).int(),
            **interpolation_inputs(grid, table),
            "order": order.transpose(1, 2).flatten(2).flatten(0, 1).int(),
        }

    def count_placeholders(self, inputs: Inputs) -> int:
        return len(inputs["order"])

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        lengths = [len(item["pixels"]) for item in items]
        device = items[0]["pixels"].device
        pixels = torch.cat([item["pixels"] for item in items])
        positions = torch.cat([item["positions"] for item in items])
        starts = [sum(lengths[:number]) for number in range(len(items))]
        order = torch.cat([item["order"] + start for item, start in zip(items, starts, strict=True)])

        out = self.tower(
            pixels,
            grid_thw=None,
            position_ids=positions,
            frame_index=torch.zeros(sum(lengths), dtype=torch.int64, device=device),  # an image has a single frame
            cu_seqlens=boundaries([(length, length) for length in lengths], device),
            max_seqlen=max(lengths),
            temporal_merge_index=order[:, None],
            return_dict=True,
            **read_interpolation(items),
        )
        features: torch.Tensor = self.projector(out.pooler_output).squeeze(1)
        return features
