"""MiniCPM-V 4.7: a picture small and in slices, whose places lie on one canvas of positions, over Qwen3.5's text model.

Clips, which its processor cuts into slices and stacks of frames, are not read here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.modalities.base import Item, Modality
from omnizoo.models.media_model import Ids
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.minicpm_towers import BEGIN, END, SLICE, SLICE_END, SlicedTower
from omnizoo.recipes.qwen_towers import SHRINK_PARTIAL
from omnizoo.recipes.vision_towers import build_vision, enter_features

NUMBER, NUMBER_END = "<image_id>", "</image_id>"


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """The published processor counts the pictures of a conversation, unless the folder says otherwise."""
    marks = (BEGIN, END, SLICE, SLICE_END, NUMBER, NUMBER_END)
    built = build_vision({"image": (SlicedTower, "<|image_pad|>", marks)}, model, folder, options)
    encoder: Any = built["image"].encoder
    if not encoder.processor.use_image_id:
        return built
    return {"image": replace(built["image"], in_chat=f"{NUMBER}{{before}}{NUMBER_END}{{item}}")}


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item]) -> Ids:
    """`[4, L]`: in the text, by which samples are told apart; then time, height and width, by the model's own rule."""
    kinds = torch.zeros(1, len(ids), dtype=torch.int64)
    sizes = []
    for item in items:
        slices, *shape = (int(size) for size in item.size.shape)
        sizes += [shape[:2], *[shape[2:]] * slices]
        for first, count in item.spans:
            kinds[0, first : first + count] = 1
    core: Any = model.get_submodule("model")
    found, _ = core.get_rope_index(torch.from_numpy(ids).long()[None], kinds, torch.tensor(sizes) if sizes else None)
    return torch.cat([torch.arange(len(ids))[None], found[:, 0]]).int().numpy()


RECIPE = Recipe(
    about="MiniCPM-V 4.7",
    blocks=("Qwen3_5DecoderLayer", "MiniCPMV4_7VisionEncoderLayer"),
    shrink={"text_config": SHRINK_PARTIAL["text_config"], "insert_layer_id": 0},
    modalities=modalities,
    positions=positions,
    enter=enter_features,
    towers={"image": "model.vision_tower"},
    projectors={"image": ("model.merger",)},
)
