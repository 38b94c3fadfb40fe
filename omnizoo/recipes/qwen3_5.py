"""Qwen3.5, dense: Qwen3-VL's media without deepstack, over gated delta net and gated attention."""

from dataclasses import replace

from omnizoo.recipes import qwen3_vl
from omnizoo.recipes.qwen_towers import SHRINK_PARTIAL

RECIPE = replace(
    qwen3_vl.RECIPE,
    about="Qwen3.5, dense",
    blocks=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"),
    shrink=SHRINK_PARTIAL,
    projectors=dict.fromkeys(qwen3_vl.MODALITIES, ("model.visual.merger",)),
)
