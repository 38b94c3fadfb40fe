"""GLM-4.5V: images; videos as a sequence of images, each followed by its time in seconds; M-RoPE; experts."""

from functools import partial

from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, visual_modules
from omnizoo.recipes.shared.glm_image import BEGIN, END, GlmImageEncoder, GlmVideoEncoder
from omnizoo.recipes.shared.qwen_image import merge_visual_features, visual_positions

PLACEHOLDER = "<|image|>"
MODALITIES = {
    "image": EncoderSpec(GlmImageEncoder, PLACEHOLDER, begin=BEGIN, end=END),
    "video": EncoderSpec(GlmVideoEncoder, PLACEHOLDER, begin="<|begin_of_video|>", end="<|end_of_video|>"),
}
RECIPE = Recipe(
    about="GLM-4.5V (106B-A12B)",
    blocks=("Glm4vMoeTextDecoderLayer", "Glm4vMoeVisionBlock"),
    # the rotary embedding applies to half of the head width
    small_config={
        "text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
        "vision_config": {"image_size": 56},
    },
    modalities=partial(build_modalities, MODALITIES),
    positions=visual_positions,
    merge_features=merge_visual_features,
    media_modules=visual_modules("model.visual", "model.visual.downsample", "model.visual.merger"),
)
