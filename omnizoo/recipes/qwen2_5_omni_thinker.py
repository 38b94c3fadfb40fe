"""The thinker of Qwen2.5-Omni: images, sound and clips; positions are in real time; towers attend in windows."""

from functools import partial

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.base import Inside
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.qwen_clips import WindowedClips
from omnizoo.recipes.qwen_sound import PooledAudioTower, SoundingClips, build_thinker, in_chunks, thinker_positions
from omnizoo.recipes.qwen_towers import SHRINK_TEXT, SHRINK_WINDOWS, WindowedTower, enter_with_sound


class Qwen25OmniClips(SoundingClips, WindowedClips):
    def turns(self, times: npt.NDArray[np.float64], heard: int) -> list[int | Inside]:
        config = self.model.config
        return in_chunks(times, heard, int(config.position_id_per_seconds * config.seconds_per_chunk))


MODALITIES = {
    "image": (WindowedTower, "<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
    "audio": (PooledAudioTower, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    "video": (Qwen25OmniClips, "<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
}
RECIPE = Recipe(
    about="Qwen2.5-Omni 3B and 7B (thinker)",
    blocks=("Qwen2_5OmniDecoderLayer", "Qwen2_5OmniVisionBlock", "Qwen2_5OmniAudioEncoderLayer"),
    shrink={"text_config": SHRINK_TEXT, "vision_config": SHRINK_WINDOWS},
    modalities=partial(build_thinker, MODALITIES),
    positions=thinker_positions,
    enter=enter_with_sound,
    towers={"image": "model.visual", "audio": "model.audio_tower", "video": "model.visual"},
    projectors={
        "image": ("model.visual.merger",),
        "audio": ("model.audio_tower.proj",),
        "video": ("model.visual.merger",),
    },
)
