"""Janus: reads images with a vision tower, and generates images as codes with a separate embedding and head."""

from transformers import JanusImageProcessorPil, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options, Recipe
from omnizoo.recipes.shared.encoders import HALF, build_with_options, load_processor, merge_features
from omnizoo.recipes.shared.image_tokenizers import SquareCodes, SquareImageEncoder

TOWER, ALIGNER = "model.vision_model", "model.aligner"


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the modalities of the model."""
    edge = model.config.vision_config.image_size
    processor = load_processor(JanusImageProcessorPil, folder, HALF, size={"height": edge, "width": edge})
    encoder = build_with_options(SquareImageEncoder, options, "image", model, processor, TOWER, ALIGNER)
    decoder = build_with_options(SquareCodes, options, "image/decoder", model, processor)
    return {"image": Modality("image", encoder, decoder, "<begin_of_image>", "<image_placeholder>", "<end_of_image>")}


RECIPE = Recipe(
    about="Janus 1B, Pro 1B, Pro 7B",
    blocks=("LlamaDecoderLayer", "JanusVisionEncoderLayer"),
    small_config={
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
    merge_features=merge_features,
    media_modules=(
        MediaModule("image", "encoder", TOWER, projectors=(ALIGNER,)),
        MediaModule("image", "decoder", "model.generation_embeddings"),
        MediaModule("image", "decoder", "model.generation_aligner"),
        MediaModule("image", "decoder", "model.generation_head"),
    ),
)
