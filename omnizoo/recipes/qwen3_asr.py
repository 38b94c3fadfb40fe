"""Qwen3-ASR: speech to text, for audio of any length in chunks of one second."""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features
from omnizoo.recipes.shared.qwen_audio import ChunkedAudioEncoder

AUDIO = EncoderSpec(ChunkedAudioEncoder, "<|audio_pad|>", begin="<|audio_start|>", end="<|audio_end|>")
RECIPE = Recipe(
    about="Qwen3-ASR 0.6B, 1.7B",
    blocks=("Qwen3DecoderLayer", "Qwen3ASRAudioEncoderLayer"),
    small_config={"audio_config": {"downsample_hidden_size": 8}},
    modalities=partial(build_modalities, {"audio": AUDIO}),
    merge_features=merge_features,
    media_modules=(MediaModule("audio", "encoder", "model.audio_tower", projectors=("model.multi_modal_projector",)),),
)
