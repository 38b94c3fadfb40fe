"""GLM-4.1V: the encoders of GLM-4.5V with a dense language model."""

from dataclasses import replace

from omnizoo.recipes import glm4v_moe

RECIPE = replace(
    glm4v_moe.RECIPE,
    about="GLM-4.1V 9B",
    blocks=("Glm4vTextDecoderLayer", "Glm4vVisionBlock"),
)
