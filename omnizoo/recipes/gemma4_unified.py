"""Gemma 4 without towers: raw pixels, of clips too, and raw sound enter the language model, each place by itself.

Tokens of a picture see each other in all layers, over windows too: so does transformers' own forward (5.22.2), and it
is the judge. In other sizes of Gemma 4 they do so in layers with a window only, within it (transformers issue 46711),
and serving engines may treat this one alike: a test here fails when transformers changes it.
"""

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from omnizoo.ops.mutual import MutualTokens
from omnizoo.recipes import gemma4
from omnizoo.recipes.base import Recipe
from omnizoo.recipes.gemma_clips import RawClips
from omnizoo.recipes.gemma_towers import BEGIN, END, SOUND_BEGIN, SOUND_END, RawPatches, RawSound

KINDS = {
    "image": (RawPatches, "<|image|>", (BEGIN, END)),
    "video": (RawClips, "<|video|>", (BEGIN, END)),
    "audio": (RawSound, "<|audio|>", (SOUND_BEGIN, SOUND_END)),
}


def mutual(model: PreTrainedModel) -> MutualTokens | None:
    config: Any = model.config
    if config.text_config.use_bidirectional_attention != "vision":
        return None
    return MutualTokens((config.image_token_id, config.video_token_id), ("image", "video"), over_windows=True)


RECIPE = Recipe(
    about="Gemma 4 12B",
    blocks=("Gemma4UnifiedTextDecoderLayer",),
    shrink={"vision_config": {"patch_size": 8, "mm_embed_dim": 64, "output_proj_dims": 64}},
    modalities=partial(gemma4.modalities, KINDS),
    enter=gemma4.enter,
    mutual=mutual,
    towers={"image": "model.embed_vision", "video": "model.embed_vision", "audio": "model.embed_audio"},
    projectors=dict.fromkeys(("image", "video"), ("model.embed_vision.multimodal_embedder",)),
)
