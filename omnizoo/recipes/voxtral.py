"""Voxtral: audio in windows of 30 s. Placeholder tokens cover the entire last window, including its padding."""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.audio_encoders import PROJECTOR, TOWER, FullWindowEncoder
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features

AUDIO = EncoderSpec(FullWindowEncoder, "[AUDIO]", begin="[BEGIN_AUDIO]")
RECIPE = Recipe(
    about="Voxtral Mini 3B, Small 24B",
    blocks=("LlamaDecoderLayer", "VoxtralEncoderLayer"),
    small_config={
        "audio_config": {"max_source_positions": 48, "intermediate_size": 256}
    },  # four positions per placeholder token
    modalities=partial(build_modalities, {"audio": AUDIO}),
    merge_features=merge_features,
    media_modules=(MediaModule("audio", "encoder", TOWER, projectors=(PROJECTOR,)),),
)
