"""Gemma 4 without towers: each token is a projection of raw pixels of an image or frame, or of raw audio samples.

Tokens of an image are bidirectional in all layers, also beyond the window, as in the forward pass of transformers
(5.22.2). In other sizes of Gemma 4, they are bidirectional in sliding-window layers only, within the window
(transformers issue 46711). Inference engines may apply the rule of the other sizes to this size, too. A test fails if
transformers changes its behavior.
"""

from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.recipe import Recipe
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens
from omnizoo.recipes import gemma4
from omnizoo.recipes.shared.encoders import EncoderSpec, visual_modules
from omnizoo.recipes.shared.gemma_encoders import AUDIO_BEGIN, AUDIO_END, BEGIN, END, RawAudioEncoder, RawImageEncoder
from omnizoo.recipes.shared.gemma_video import RawVideoEncoder

ENCODERS = {
    "image": EncoderSpec(RawImageEncoder, "<|image|>", (BEGIN, END)),
    "video": EncoderSpec(RawVideoEncoder, "<|video|>", (BEGIN, END)),
    "audio": EncoderSpec(RawAudioEncoder, "<|audio|>", (AUDIO_BEGIN, AUDIO_END)),
}


def bidirectional_tokens(model: PreTrainedModel) -> BidirectionalTokens | None:
    """Return the tokens that attend in both directions, in all layers; None if the model is fully causal."""
    tokens = gemma4.bidirectional_tokens(model)
    return tokens and replace(tokens, everywhere=True, over_windows=True)


RECIPE = Recipe(
    about="Gemma 4 12B",
    blocks=("Gemma4UnifiedTextDecoderLayer",),
    small_config={"vision_config": {"patch_size": 8, "mm_embed_dim": 64, "output_proj_dims": 64}},
    modalities=partial(gemma4.build_encoders, ENCODERS),
    merge_features=gemma4.merge_media,
    bidirectional=bidirectional_tokens,
    media_modules=(
        *visual_modules("model.embed_vision", "model.embed_vision.multimodal_embedder"),
        MediaModule("audio", "encoder", "model.embed_audio"),
    ),
)
