"""CSM: speech of several speakers, generated as Mimi codes from the text of their turns. CSM generates no text."""

from transformers import PreTrainedModel

from omnizoo.modalities.base import Modality
from omnizoo.models.media.media_model import MediaModule, SpeakerFormat
from omnizoo.models.recipe import Options, Recipe
from omnizoo.recipes.shared.encoders import build_with_options
from omnizoo.recipes.shared.speech_tokenizers import DepthCodes, merge_frame_embeddings


def modalities(model: PreTrainedModel, folder: str | None, options: Options) -> dict[str, Modality]:
    """Build the modalities of the model."""
    codes = build_with_options(DepthCodes, options, "audio/decoder", model)
    return {"audio": Modality("audio", None, codes, "", "<|AUDIO|>", "", last="<|audio_eos|>")}


RECIPE = Recipe(
    about="CSM 1B",
    blocks=("CsmDecoderLayer",),
    small_config={
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
    merge_features=merge_frame_embeddings,
    media_modules=(MediaModule("audio", "decoder", "depth_decoder"),),
    speaker_format=SpeakerFormat("{bos_token}[{role}]", "{eos_token}", r"\d+", 'a speaker by number, such as "0"', "0"),
    uninitialized=("MimiEuclideanCodebook.embed_sum",),  # zeros by default; they would map all audio to one code
)
