"""Thinker of Qwen3-Omni: images, audio and video; fractional positions in units of real time; deepstack."""

from functools import partial

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.item import NestedRun
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec
from omnizoo.recipes.shared.qwen_audio import (
    QwenAudioEncoder,
    VideoWithAudioEncoder,
    build_thinker,
    interleave_by_time,
    thinker_positions,
)
from omnizoo.recipes.shared.qwen_image import (
    BEGIN,
    END,
    SMALL_DEEPSTACK,
    InterpolatedImageEncoder,
    deepstack_inputs,
    merge_audio_visual_features,
)
from omnizoo.recipes.shared.qwen_video import InterpolatedVideoEncoder


class Qwen3OmniVideoEncoder(VideoWithAudioEncoder, InterpolatedVideoEncoder):
    """Video encoder that interleaves frames and audio token by token."""

    def interleave(self, times: npt.NDArray[np.float64], num_audio: int) -> list[int | NestedRun]:
        return interleave_by_time(times, num_audio)


MODALITIES = {
    "image": EncoderSpec(InterpolatedImageEncoder, "<|image_pad|>", begin=BEGIN, end=END),
    "audio": EncoderSpec(QwenAudioEncoder, "<|audio_pad|>", begin="<|audio_start|>", end="<|audio_end|>"),
    "video": EncoderSpec(Qwen3OmniVideoEncoder, "<|video_pad|>", begin=BEGIN, end=END),
}
MERGERS = ("model.visual.merger", "model.visual.merger_list")
RECIPE = Recipe(
    about="Qwen3-Omni 30B-A3B (thinker)",
    blocks=(
        "Qwen3OmniMoeThinkerTextDecoderLayer",
        "Qwen3OmniMoeVisionBlock",
        "Qwen3OmniMoeAudioEncoderLayer",
    ),  # set here, because `_no_split_modules` of the model lists entire towers
    small_config=SMALL_DEEPSTACK | {"audio_config": {"downsample_hidden_size": 8}},
    modalities=partial(build_thinker, MODALITIES),
    positions=thinker_positions,
    merge_features=merge_audio_visual_features,
    language_model_inputs=deepstack_inputs,
    media_modules=(
        MediaModule("image", "encoder", "model.visual", projectors=MERGERS),
        MediaModule(
            "audio", "encoder", "model.audio_tower", projectors=("model.audio_tower.proj1", "model.audio_tower.proj2")
        ),
        MediaModule("video", "encoder", "model.visual", projectors=MERGERS),
    ),
)
