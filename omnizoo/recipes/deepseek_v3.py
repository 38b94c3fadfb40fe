"""DeepSeek V3: latent attention (keys wider than values), dense first layers, grouped sigmoid routing with a bias."""

from omnizoo.recipes.base import Recipe

RECIPE = Recipe(
    about="DeepSeek V3 and R1",
    shrink={
        "first_k_dense_replace": 1,  # one layer of each kind
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,  # of the rotary part
    },
    attention_width=("qk_head_dim", "v_head_dim"),
)
