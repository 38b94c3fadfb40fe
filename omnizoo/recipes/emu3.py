"""Emu3: reads and generates images as tokens of its vocabulary. Its own VQ model computes these tokens.

Images may have any shape; each row of codes ends with a special token.
"""

from transformers import Emu3ImageProcessor, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options, Recipe
from omnizoo.recipes.shared.encoders import HALF, build_with_options, load_processor
from omnizoo.recipes.shared.image_tokenizers import LineCodes, merge_token_ids


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the modalities of the model."""
    factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
    processor = load_processor(Emu3ImageProcessor, folder, HALF, spatial_factor=factor)
    codes = build_with_options(LineCodes, options, "image/decoder", model, processor, folder)
    return {"image": Modality("image", None, codes, "<|image start|>", "<image>", "<|image end|>")}


RECIPE = Recipe(
    about="Emu3 Chat, Gen 8B",
    blocks=("Emu3DecoderLayer",),
    modalities=modalities,
    merge_features=merge_token_ids,
    media_modules=(MediaModule("image", "decoder", ""),),
)
