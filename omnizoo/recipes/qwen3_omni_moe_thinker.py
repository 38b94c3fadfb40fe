"""The thinker of Qwen3-Omni: images, sound and clips; positions are in real time (fractions, too); deepstack."""

from functools import partial

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.base import Inside
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import InterpolatedClips
from omnizoo.recipes.qwen_sound import AudioTower, SoundingClips, build_thinker, by_time, thinker_positions
from omnizoo.recipes.qwen_towers import BEGIN, END, SHRINK, InterpolatedTower, enter_with_sound


class Qwen3OmniClips(SoundingClips, InterpolatedClips):
    def turns(self, times: npt.NDArray[np.float64], heard: int) -> list[int | Inside]:
        return by_time(times, heard)


MODALITIES = {
    "image": (InterpolatedTower, BEGIN, "<|image_pad|>", END),
    "audio": (AudioTower, "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    "video": (Qwen3OmniClips, BEGIN, "<|video_pad|>", END),
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
    modalities=partial(build_thinker, MODALITIES),
    positions=thinker_positions,
    enter=enter_with_sound,
    towers={"image": "model.visual", "audio": "model.audio_tower", "video": "model.visual"},
    projectors={"image": MERGERS, "audio": ("model.audio_tower.proj1", "model.audio_tower.proj2"), "video": MERGERS},
)
