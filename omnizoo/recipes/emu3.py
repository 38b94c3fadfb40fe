"""Emu3: pictures in and out as tokens of the text, made by its own VQ model; any shape, a line at a time."""

from transformers import Emu3ImageProcessor, PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.picture_codes import LinedCodes, checked, enter_ids, picture_processor


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    factor = 2 ** (len(model.config.vq_config.channel_multiplier) - 1)
    processor = picture_processor(Emu3ImageProcessor, folder, spatial_factor=factor)
    given = options.get("image/decoder", {})
    codes = checked(LinedCodes, "model.modalities.image.decoder", model, processor, folder, **given)
    return {"image": Modality("image", None, codes, "<|image start|>", "<image>", "<|image end|>")}


RECIPE = Recipe(
    about="Emu3 Chat, Gen 8B",
    blocks=("Emu3DecoderLayer",),
    modalities=modalities,
    enter=enter_ids,
    producers={"image": ()},
)
