"""Audio Flamingo 3: audio of up to ten minutes, in windows of 30 s whose padding is masked."""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.audio_encoders import PROJECTOR, TOWER, MultiWindowEncoder
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features

AUDIO = EncoderSpec(MultiWindowEncoder, "<sound>")
RECIPE = Recipe(
    about="Audio Flamingo 3 7B",
    blocks=("Qwen2DecoderLayer", "AudioFlamingo3EncoderLayer"),
    small_config={"audio_config": {"max_source_positions": 50}},
    modalities=partial(build_modalities, {"audio": AUDIO}),
    merge_features=merge_features,
    media_modules=(MediaModule("audio", "encoder", TOWER, projectors=(PROJECTOR,)),),
)
