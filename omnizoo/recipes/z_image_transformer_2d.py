"""Z-Image: text to image. Latents and text are one sequence after the refiners, each padded to a multiple of 32."""

from omnizoo.models.diffusion.recipe import LATENTS, Config, Cut, DiffusionRecipe, Grid, Split
from omnizoo.recipes.shared.diffusion import text


def patch(config: Config) -> Grid:
    """Return the first patch size of the config, which is the default of the model."""
    side = config["all_patch_size"][0]
    return config["all_f_patch_size"][0], side, side


def channels(config: Config) -> int:
    """Return the channels of the latents."""
    return int(config["in_channels"])


RECIPE = DiffusionRecipe(
    about="Z-Image and Z-Image-Turbo, 6B",
    media=("image",),
    blocks=("ZImageTransformerBlock",),
    conditions={"text": text("cap_feats", "cap_feat_dim")},
    small_config={
        "n_layers": 2,
        "n_refiner_layers": 1,
        "dim": 64,
        "n_heads": 4,
        "n_kv_heads": 4,
        "axes_dims": [4, 6, 6],
    },
    patch=patch,
    channels=channels,
    heads="n_heads",
    latents_argument="x",
    takes_lists=True,
    time_argument="t",
    time_scale=1.0,
    is_time_reversed=True,
    output_sign=-1.0,
    token_multiple=32,
    trims_text=True,
    unsupported={"siglip_feat_dim": "conditioning images are not supported for this family"},
    split=Split(
        inputs={"layers.0": {"x": Cut(LATENTS)}, "layers.*": {"freqs_cis": Cut(LATENTS)}},
        gathered="all_final_layer.*",
        attention={"layers.*.attention": (LATENTS,)},
        local_attention=("noise_refiner.*.attention", "context_refiner.*.attention"),
        joins_text=True,
    ),
)
