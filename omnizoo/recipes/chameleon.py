"""Chameleon: pictures in as tokens of the text, and predicted as such. transformers' VQ model cannot draw them."""

from transformers import ChameleonImageProcessorPil, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.picture_codes import VocabularyCodes, checked, enter_ids
from omnizoo.recipes.qwen_towers import preprocessor


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    edge = model.config.vq_config.resolution
    size, crop = {"shortest_edge": edge}, {"height": edge, "width": edge}
    processor = preprocessor(ChameleonImageProcessorPil, folder, {}, size=size, crop_size=crop)
    given = options.get("image/decoder", {})
    codes = checked(VocabularyCodes, "model.modalities.image.decoder", model, processor, edge, **given)
    return {"image": Modality("image", None, codes, "<racm3:break>", "<image>", "<eoss>")}


RECIPE = Recipe(
    about="Chameleon 7B, 30B",
    modalities=modalities,
    enter=enter_ids,
    producers={"image": ()},
)
