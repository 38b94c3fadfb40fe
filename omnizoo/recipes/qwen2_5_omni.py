"""Qwen2.5-Omni whole: the thinker, the talker that follows it, and the codec (token2wav) that is never trained."""

from dataclasses import replace
from typing import Any

from omnizoo.recipes.qwen2_5_omni_thinker import RECIPE as THINKER
from omnizoo.recipes.qwen2_5_talker import Qwen25Talker

WIDTH = 128  # of what `omnizoo verify` runs: each part takes in what another one gives
CODEC: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "emb_dim": 16,
}
CODEC |= {"enc_dim": 8, "enc_channels": [8, 8, 8, 8, 24], "enc_attention_channels": 8, "enc_se_channels": 8}
CODEC |= {"look_ahead_layers": [0], "look_backward_layers": [1]}
RECIPE = replace(
    THINKER,
    about="Qwen2.5-Omni 3B and 7B with their talker",
    shrink={
        "thinker_config": {
            **THINKER.shrink,
            "text_config": {**THINKER.shrink["text_config"], "hidden_size": WIDTH},
            "vision_config": {**THINKER.shrink["vision_config"], "out_hidden_size": WIDTH},
            "audio_config": {"output_dim": WIDTH},
        },
        "talker_config": {
            "embedding_size": WIDTH,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"mrope_section": [4, 2, 2]},
        },
        "token2wav_config": {"dit_config": CODEC, "bigvgan_config": {"upsample_initial_channel": 64}},
    },
    language="thinker",
    towers={name: f"thinker.{part}" for name, part in THINKER.towers.items()},
    projectors={name: tuple(f"thinker.{p}" for p in parts) for name, parts in THINKER.projectors.items()},
    followers={"speech": ("talker", Qwen25Talker)},
    idle=("token2wav",),
)
