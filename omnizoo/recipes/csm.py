"""CSM: speakers who say what their turns have as text, in codes of Mimi. It writes no text."""

from transformers import PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.media_model import Turns
from omnizoo.recipes.base import Options, Recipe
from omnizoo.recipes.picture_codes import checked
from omnizoo.recipes.speech_codes import DepthCodes, enter

CODEC, DEPTH = "codec_model", "depth_decoder"


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    given = options.get("audio/decoder", {})
    codes = checked(DepthCodes, "model.modalities.audio.decoder", model, CODEC, DEPTH, **given)
    return {"audio": Modality("audio", None, codes, "", "<|AUDIO|>", "", last="<|audio_eos|>")}


RECIPE = Recipe(
    about="CSM 1B",
    blocks=("CsmDecoderLayer",),
    shrink={
        "depth_decoder_config": {
            "backbone_hidden_size": 128,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "codec_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "num_filters": 4,
            "upsample_groups": 32,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
        },
    },
    modalities=modalities,
    enter=enter,
    producers={"audio": (DEPTH,)},
    turns=Turns("{bos_token}[{role}]", "{eos_token}", r"\d+", 'a speaker by number, such as "0"', "0"),
    undrawn=("MimiEuclideanCodebook.embed_sum",),  # zeros, with which every sound would be one code
)
