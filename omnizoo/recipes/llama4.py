"""Llama 4: experts; images as square tiles and a thumbnail. The shape of an image determines the number of tiles.

The experts bypass the experts interface of transformers and run on all tokens, so expert parallelism is unavailable.
"""

from functools import partial

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.recipes.shared.encoders import EncoderSpec, build_modalities, merge_features
from omnizoo.recipes.shared.llama4_image import MARKS, CanvasEncoder

RECIPE = Recipe(
    about="Llama 4 Scout and Maverick",
    has_experts=False,
    small_config={
        "vision_config": {"image_size": 56, "patch_size": 14, "hidden_size": 64, "intermediate_size": 256}
        | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
    },
    modalities=partial(build_modalities, {"image": EncoderSpec(CanvasEncoder, "<|patch|>", MARKS)}),
    merge_features=merge_features,
    media_modules=(MediaModule("image", "encoder", "vision_model", projectors=("multi_modal_projector",)),),
)
