"""Voxtral: sound in windows of 30 s, each of which takes all its places, silence included."""

from omnizoo.recipes.audio_towers import PROJECTOR, TOWER, FullWindows, enter, sound_only
from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Voxtral Mini 3B, Small 24B",
    blocks=("LlamaDecoderLayer", "VoxtralEncoderLayer"),
    shrink={"audio_config": {"max_source_positions": 48, "intermediate_size": 256}},  # four positions become a place
    modalities=sound_only(FullWindows, "[BEGIN_AUDIO]", "[AUDIO]"),
    enter=enter,
    towers={"audio": TOWER},
    projectors={"audio": (PROJECTOR,)},
)
