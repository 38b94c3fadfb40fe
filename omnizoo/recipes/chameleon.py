"""Chameleon: reads and generates images as tokens of its vocabulary.

The VQ model of transformers has no decoder, so generated tokens cannot be rendered as images.
"""

from transformers import ChameleonImageProcessorPil, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Options, Recipe
from omnizoo.recipes.shared.encoders import build_with_options, load_processor
from omnizoo.recipes.shared.image_tokenizers import VocabularyCodes, merge_token_ids


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the modalities of the model."""
    edge = model.config.vq_config.resolution
    size, crop = {"shortest_edge": edge}, {"height": edge, "width": edge}
    processor = load_processor(ChameleonImageProcessorPil, folder, {}, size=size, crop_size=crop)
    codes = build_with_options(VocabularyCodes, options, "image/decoder", model, processor, edge)
    return {"image": Modality("image", None, codes, "<racm3:break>", "<image>", "<eoss>")}


RECIPE = Recipe(
    about="Chameleon 7B, 30B",
    modalities=modalities,
    merge_features=merge_token_ids,
    media_modules=(MediaModule("image", "decoder", ""),),
)
