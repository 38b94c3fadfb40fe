"""Qwen2-Audio: sounds of up to 30 s, numbered where the published chat template writes them."""

from omnizoo.recipes.audio_towers import PROJECTOR, TOWER, MaskedWindows, enter, sound_only
from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="Qwen2-Audio 7B",
    blocks=("Qwen2DecoderLayer", "Qwen2AudioEncoderLayer"),
    shrink={"audio_config": {"max_source_positions": 100}},
    modalities=sound_only(
        MaskedWindows, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", in_chat="Audio {number}: {item}\n"
    ),
    enter=enter,
    towers={"audio": TOWER},
    projectors={"audio": (PROJECTOR,)},
)
