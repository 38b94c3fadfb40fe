"""Llama 4: pictures in squares, as many as fit their shape, and one more that shows the whole; experts.

Its experts all run on every token, by code of their own: there is nothing for expert parallelism to deal out.
"""

from functools import partial

from omnizoo.recipes.base import Recipe
from omnizoo.recipes.llama_towers import MARKS, CanvasTower
from omnizoo.recipes.vision_towers import build_vision, enter_features

RECIPE = Recipe(
    about="Llama 4 Scout and Maverick",
    has_experts=False,
    shrink={
        "vision_config": {"image_size": 56, "patch_size": 14, "hidden_size": 64, "intermediate_size": 256}
        | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
    },
    modalities=partial(build_vision, {"image": (CanvasTower, "<|patch|>", MARKS)}),
    enter=enter_features,
    towers={"image": "vision_model"},
    projectors={"image": ("multi_modal_projector",)},
)
