"""Audio Flamingo 3: sound of up to ten minutes, in windows of 30 s that are masked where it ends."""

from omnizoo.recipes.audio_towers import PROJECTOR, TOWER, SeveralWindows, enter, sound_only
from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Audio Flamingo 3 7B",
    blocks=("Qwen2DecoderLayer", "AudioFlamingo3EncoderLayer"),
    shrink={"audio_config": {"max_source_positions": 50}},
    modalities=sound_only(SeveralWindows, "", "<sound>"),
    enter=enter,
    towers={"audio": TOWER},
    projectors={"audio": (PROJECTOR,)},
)
