"""MiniCPM-V 4.7: the language model of Qwen3.5; the thumbnail and slices of an image share one grid of positions.

Videos are not supported. The model's processor splits them into slices and stacks of frames.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.modalities.item import Ids, MediaItem
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options, Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features
from omnizoo.recipes.shared.minicpm_image import BEGIN, END, SLICE, SLICE_END, SlicedEncoder
from omnizoo.recipes.shared.qwen_image import SMALL_PARTIAL_ROTARY, token_kinds, with_text_positions

NUMBER, NUMBER_END = "<image_id>", "</image_id>"


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the image encoder. As in the published processor, images are numbered unless the folder disables it."""
    marks = (BEGIN, END, SLICE, SLICE_END, NUMBER, NUMBER_END)
    built = build_modalities({"image": EncoderSpec(SlicedEncoder, "<|image_pad|>", marks)}, model, folder, options)
    encoder: Any = built["image"].encoder
    if not encoder.processor.use_image_id:
        return built
    return {"image": replace(built["image"], in_chat=f"{NUMBER}{{before}}{NUMBER_END}{{item}}")}


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[MediaItem]) -> Ids:
    """Return positions `[4, tokens]`, like `visual_positions`, computed by the model's `get_rope_index`."""
    sizes = []
    for item in items:
        slices, *shape = (int(size) for size in item.size.shape)
        sizes += [shape[:2], *[shape[2:]] * slices]
    inner_model: Any = model.get_submodule("model")
    input_ids = torch.from_numpy(ids).long()[None]
    axes, _ = inner_model.get_rope_index(input_ids, token_kinds(ids, items), torch.tensor(sizes) if sizes else None)
    return with_text_positions(axes).int().numpy()


RECIPE = Recipe(
    about="MiniCPM-V 4.7",
    blocks=("Qwen3_5DecoderLayer", "MiniCPMV4_7VisionEncoderLayer"),
    small_config={"text_config": SMALL_PARTIAL_ROTARY["text_config"], "insert_layer_id": 0},
    modalities=modalities,
    positions=positions,
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "model.vision_tower", projectors=("model.merger",)),),
)
