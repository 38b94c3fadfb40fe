"""Mistral 3 (Small 3.1 and later): images of any shape, as rows of tokens. The language model may be of any kind."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import Media
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, load_processor, merge_features
from omnizoo.recipes.shared.image_encoders import PatchEncoder

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class RowEncoder(PatchEncoder):
    """Encoder that resizes images to at most `max_edge` pixels per side. The preprocessor config sets the default."""

    def __init__(self, model: PreTrainedModel, folder: str | None, max_edge: int | None = None) -> None:
        super().__init__(model, "model.vision_tower", "model.multi_modal_projector")
        config: Any = model.config
        self.patch: int = config.vision_config.patch_size
        self.factor: int = self.patch * config.spatial_merge_size  # pixels per side of a placeholder token
        published = {"size": {"longest_edge": config.vision_config.image_size}}
        square = {"height": self.factor, "width": self.factor}
        limit = {"longest_edge": max_edge} if max_edge else None
        self.processor = load_processor(PixtralImageProcessorPil, folder, published, patch_size=square, size=limit)

    def measure(self, media: Media) -> MediaSize:
        size, empty = self.processor.size, np.broadcast_to(np.uint8(0), (3, *image_size(media)))
        most = (size.longest_edge,) * 2 if size.longest_edge else (size.height, size.width)
        height, width = get_resize_output_image_size(empty, most, (self.factor,) * 2, ChannelDimension.FIRST)
        rows, columns = height // self.factor, width // self.factor
        lines = [part for _ in range(rows) for part in (columns, BREAK)]
        return self.size_of(height * width // self.patch**2, rows * columns, (*lines[:-1], END))

    def prepare(self, media: Media) -> Inputs:
        return {"pixels": self.processor(images=read_image(media), return_tensors="pt")["pixel_values"][0]}

    def dummy_input(self) -> Inputs:
        return {"pixels": torch.zeros(3, self.factor, self.factor)}

    def count_placeholders(self, inputs: Inputs) -> int:
        return inputs["pixels"][0].numel() // self.factor**2

    def encode(self, items: Sequence[Inputs]) -> torch.Tensor:
        """Return the features. Images are padded to the size of the largest one; the tower ignores the padding."""
        shapes = [tuple(item["pixels"].shape[1:]) for item in items]
        height, width = (max(edges) for edges in zip(*shapes, strict=True))
        filled = [
            pad(item["pixels"], (0, width - w, 0, height - h)) for item, (h, w) in zip(items, shapes, strict=True)
        ]
        layer = self.model.config.vision_feature_layer
        out = self.tower(torch.stack(filled), image_sizes=shapes, output_hidden_states=layer != -1, return_dict=True)
        chosen = [out.last_hidden_state] if layer == -1 else [out.hidden_states[n] for n in np.atleast_1d(layer)]
        features: torch.Tensor = self.projector(torch.cat(chosen, -1).squeeze(0), shapes)
        return features


RECIPE = Recipe(
    about="Mistral Small 3.1 and 3.2, Ministral 3",
    small_config={"vision_config": {"image_size": 112, "patch_size": 14}},
    modalities=partial(build_modalities, {"image": EncoderSpec(RowEncoder, "[IMG]", (BREAK, END))}),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.multi_modal_projector",)),),
)
