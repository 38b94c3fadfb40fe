"""Qwen3-ASR: speech to text, sound of any length in chunks of a second."""

from omnizoo.recipes.audio_towers import PROJECTOR, TOWER, ChunkTower, enter, sound_only
from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Qwen3-ASR 0.6B, 1.7B",
    blocks=("Qwen3DecoderLayer", "Qwen3ASRAudioEncoderLayer"),
    shrink={"audio_config": {"downsample_hidden_size": 8}},
    modalities=sound_only(ChunkTower, "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    enter=enter,
    towers={"audio": TOWER},
    projectors={"audio": (PROJECTOR,)},
)
