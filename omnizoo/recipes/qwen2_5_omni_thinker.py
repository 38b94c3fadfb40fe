"""Thinker of Qwen2.5-Omni: images, audio and video; positions in units of real time; towers with window attention."""

from functools import partial

import numpy as np
import numpy.typing as npt

from omnizoo.modalities.item import NestedRun
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec
from omnizoo.recipes.shared.qwen_audio import (
    PooledAudioEncoder,
    VideoWithAudioEncoder,
    build_thinker,
    interleave_chunks,
    thinker_positions,
)
from omnizoo.recipes.shared.qwen_image import (
    SMALL_MROPE,
    SMALL_WINDOWS,
    WindowedImageEncoder,
    merge_audio_visual_features,
)
from omnizoo.recipes.shared.qwen_video import WindowedVideoEncoder


class Qwen25OmniVideoEncoder(VideoWithAudioEncoder, WindowedVideoEncoder):
    """Video encoder that interleaves frames and audio in chunks of time."""

    def interleave(self, times: npt.NDArray[np.float64], num_audio: int) -> list[int | NestedRun]:
        config = self.model.config
        chunk = int(config.position_id_per_seconds * config.seconds_per_chunk)
        return interleave_chunks(times, num_audio, chunk)


MODALITIES = {
    "image": EncoderSpec(WindowedImageEncoder, "<|IMAGE|>", begin="<|vision_bos|>", end="<|vision_eos|>"),
    "audio": EncoderSpec(PooledAudioEncoder, "<|AUDIO|>", begin="<|audio_bos|>", end="<|audio_eos|>"),
    "video": EncoderSpec(Qwen25OmniVideoEncoder, "<|VIDEO|>", begin="<|vision_bos|>", end="<|vision_eos|>"),
}
RECIPE = Recipe(
    about="Qwen2.5-Omni 3B and 7B (thinker)",
    blocks=("Qwen2_5OmniDecoderLayer", "Qwen2_5OmniVisionBlock", "Qwen2_5OmniAudioEncoderLayer"),
    small_config={"text_config": SMALL_MROPE, "vision_config": SMALL_WINDOWS},
    modalities=partial(build_thinker, MODALITIES),
    positions=thinker_positions,
    merge_features=merge_audio_visual_features,
    media_modules=(
        MediaModule("image", "encoder", "model.visual", projectors=("model.visual.merger",)),
        MediaModule("audio", "encoder", "model.audio_tower", projectors=("model.audio_tower.proj",)),
        MediaModule("video", "encoder", "model.visual", projectors=("model.visual.merger",)),
    ),
)
