"""Complete Qwen3-Omni: the thinker, the talker as its follower, and a codec that is never trained."""

from dataclasses import replace

from omnizoo.models.media.media_model import MediaModule
from omnizoo.recipes.qwen3_omni_moe_thinker import RECIPE as THINKER
from omnizoo.recipes.shared.qwen3_talker import Qwen3Talker

WIDTH, TALKER = 128, 64  # common widths of the components of the small copy that `omnizoo verify` runs
THINKER_PARTS = {"text_config": {"hidden_size": WIDTH}, "vision_config": {"out_hidden_size": WIDTH}}
CODE_PREDICTOR = {"hidden_size": TALKER, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
CODE_PREDICTOR |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CODEC = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "decoder_dim": 32}
CODEC |= {"num_attention_heads": 4, "num_key_value_heads": 4}
RECIPE = replace(
    THINKER,
    about="Qwen3-Omni 30B-A3B with its talker",
    blocks=(
        *THINKER.blocks,
        "Qwen3OmniMoeTalkerDecoderLayer",
        "Qwen3OmniMoeTalkerCodePredictorDecoderLayer",
    ),
    small_config={
        "thinker_config": {**THINKER_PARTS, "audio_config": {"output_dim": WIDTH}},
        "talker_config": {
            "thinker_hidden_size": WIDTH,
            "accept_hidden_layer": 2,
            "text_config": {"hidden_size": TALKER, "rope_parameters": {"mrope_section": [4, 2, 2]}},
            "code_predictor_config": {**CODE_PREDICTOR, "layer_types": ["full_attention"] * 2},
        },
        "code2wav_config": CODEC,
    },
    language="thinker",
    media_modules=(
        *(module.within("thinker") for module in THINKER.media_modules),
        MediaModule("speech", "follower", "talker", follower=Qwen3Talker),
    ),
    idle=("code2wav",),
    uninitialized=("Qwen3OmniMoeTalkerTextExperts", "Qwen3OmniMoeTalkerTextTopKRouter"),
)
