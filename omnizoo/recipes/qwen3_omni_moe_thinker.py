"""The thinker of Qwen3-Omni: images, sound and clips; positions are in real time (fractions, too); deepstack."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from omnizoo.modalities.base import Item
from omnizoo.models.media_batch import Features
from omnizoo.models.media_model import Ids
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_towers import (
    BEGIN,
    END,
    SHRINK,
    AudioTower,
    ImageTower,
    VideoTower,
    build_modalities,
    enter_visual,
    put,
    shapes_of,
)


def positions(model: PreTrainedModel, ids: Ids, items: Sequence[Item]) -> npt.NDArray[np.float32]:
    """`[4, L]`: in the text, by which samples are told apart; then time, height and width."""
    tokens = torch.from_numpy(ids).long()[None]
    sounds, clips = shapes_of(items, "audio"), shapes_of(items, "video")
    family: Any = model
    axes, _ = family.get_rope_index(
        tokens,
        image_grid_thw=shapes_of(items, "image"),
        video_grid_thw=None if clips is None else clips[:, :3].long(),
        attention_mask=torch.ones_like(tokens),
        audio_seqlens=None if sounds is None else sounds[:, 0],
        second_per_grids=None if clips is None else clips[:, 3],
    )
    counted: npt.NDArray[np.float32] = torch.cat([torch.arange(len(ids))[None], axes[:, 0]]).float().numpy()
    return counted


def enter(model: PreTrainedModel, inputs: dict[str, Any], features: Mapping[str, Features]) -> dict[str, Any]:
    sound = features["audio"]
    embeddings = put(model.get_input_embeddings()(inputs["input_ids"]), sound.index, sound.values)
    return enter_visual(model, inputs | {"inputs_embeds": embeddings}, features)


MODALITIES = {
    "image": (ImageTower, BEGIN, "<|image_pad|>", END),
    "audio": (AudioTower, "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    "video": (VideoTower, BEGIN, "<|video_pad|>", END),
}
MERGERS = ("model.visual.merger", "model.visual.merger_list")
RECIPE = Recipe(
    about="Qwen3-Omni 30B-A3B (thinker)",
    blocks=(
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeVisionBlock",
        "Qwen3OmniMoeAudioEncoderLayer",
    ),  # the model itself calls whole towers indivisible
    shrink=SHRINK | {"audio_config": {"downsample_hidden_size": 8}},
    modalities=partial(build_modalities, MODALITIES),
    positions=positions,
    enter=enter,
    towers={"image": "model.visual", "audio": "model.audio_tower", "video": "model.visual"},
    projectors={"image": MERGERS, "audio": ("model.audio_tower.proj1", "model.audio_tower.proj2"), "video": MERGERS},
)
