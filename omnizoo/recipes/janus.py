"""Janus: pictures in through a vision tower, pictures out as codes, with an embedding and a head of their own."""

from transformers import JanusImageProcessorPil, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.recipes.audio_towers import enter
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.picture_codes import SquareCodes, SquareTower, checked, picture_processor

TOWER, ALIGNER = "model.vision_model", "model.aligner"


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    edge = model.config.vision_config.image_size
    processor = picture_processor(JanusImageProcessorPil, folder, size={"height": edge, "width": edge})
    given = {role: options.get(f"image{role}", {}) for role in ("", "/decoder")}
    tower = checked(SquareTower, "model.modalities.image.encoder", model, processor, TOWER, ALIGNER, **given[""])
    codes = checked(SquareCodes, "model.modalities.image.decoder", model, processor, **given["/decoder"])
    return {"image": Modality("image", tower, codes, "<begin_of_image>", "<image_placeholder>", "<end_of_image>")}


RECIPE = Recipe(
    about="Janus 1B, Pro 1B, Pro 7B",
    blocks=("LlamaDecoderLayer", "JanusVisionEncoderLayer"),
    shrink={
        "vision_config": {"image_size": 32, "patch_size": 8, "num_image_tokens": 16, "projection_dim": 128},
        "vq_config": {
            "num_embeddings": 64,
            "latent_channels": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "projection_dim": 128,
            "image_token_embed_dim": 128,
            "num_hidden_layers": 2,
        },
    },
    modalities=modalities,
    enter=enter,
    towers={"image": TOWER},
    projectors={"image": (ALIGNER,)},
    producers={"image": ("model.generation_embeddings", "model.generation_aligner", "model.generation_head")},
)
