"""Qwen2-Audio: audio of up to 30 s, numbered in chats as in the published chat template."""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.audio_encoders import PROJECTOR, TOWER, MaskedWindowEncoder
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features

AUDIO = EncoderSpec(
    MaskedWindowEncoder, "<|AUDIO|>", begin="<|audio_bos|>", end="<|audio_eos|>", in_chat="Audio {number}: {item}\n"
)
RECIPE = Recipe(
    about="Qwen2-Audio 7B",
    blocks=("Qwen2DecoderLayer", "Qwen2AudioEncoderLayer"),
    small_config={"audio_config": {"max_source_positions": 100}},
    modalities=partial(build_modalities, {"audio": AUDIO}),
    merge_features=merge_features,
    media_modules=(MediaModule("audio", "encoder", TOWER, projectors=(PROJECTOR,)),),
)
