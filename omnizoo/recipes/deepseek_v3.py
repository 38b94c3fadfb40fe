"""DeepSeek V3: latent attention (keys wider than values), dense first layers, grouped sigmoid routing with a bias."""

from omnizoo.models.recipe import Recipe

RECIPE = Recipe(
    about="DeepSeek V3 and R1",
    small_config={
        "first_k_dense_replace": 1,  # one dense layer, one layer with experts
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,  # width of the rotary part
    },
    attention_width=("qk_head_dim", "v_head_dim"),
)
