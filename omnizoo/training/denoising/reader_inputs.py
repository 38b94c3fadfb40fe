"""Collect the arguments of the data loader that depend on a diffusion transformer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.modalities.denoised import DenoisedItem, PixelShape, denoised_modalities
from omnizoo.models.diffusion.samples import SampleSizes, pipeline_of
from omnizoo.training.denoising.simulated_items import SimulatedItem

Simulated = Literal["full", "small"]


def denoiser_inputs(config: Config, simulated: Simulated | None = None) -> dict[str, Any]:
    """Return the arguments of readers and loaders for a diffusion transformer, without weights.

    Args:
        config: The config of the run.
        simulated: `full` to replace items by nothing, for a dry run; `small` for random items with a few patches.

    Raises:
        UserError: If a shape does not fit the autoencoder, or a key of the config does not apply.
    """
    if config.train.micro_batch != 1:
        raise UserError(
            f"train.micro_batch: {config.train.micro_batch}, but packs of a diffusion transformer have different "
            "shapes. Set it to 1, and raise data.pack_tokens for more samples in each forward pass."
        )
    shapes = config.data.shapes or []
    parsed = [PixelShape.parse(shape) for shape in shapes]
    folder = pipeline_of(config.model)
    sizes = SampleSizes.of(config.model).for_rows(folder, parsed, config.data.text_tokens)
    _check_token_counts(config, parsed, sizes)
    modalities = denoised_modalities(
        sizes.media, sizes, shapes=shapes, crop=config.data.crop, frame_rate=config.data.frame_rate
    )
    if simulated is not None:
        is_small = simulated == "small"
        if is_small:
            sizes = replace(sizes, fixed_text_tokens=sizes.small_text_tokens, text_sizes=None)
        for name, modality in modalities.items():
            assert isinstance(modality.decoder, DenoisedItem)
            modalities[name] = replace(modality, decoder=SimulatedItem(modality.decoder, sizes, is_small))
    return {"modalities": modalities, "prompts": sizes}


def _check_token_counts(config: Config, shapes: Sequence[PixelShape], sizes: SampleSizes) -> None:
    """Check that every rank that shares a sample gets at least one token of its latents."""
    num_ranks = config.parallel.ulysses * config.parallel.ring
    for shape in shapes:
        num_tokens = sizes.latent_tokens(sizes.latent_shape(*shape))
        if num_tokens < num_ranks:
            raise UserError(
                f"data.shapes: {shape} has {num_tokens} tokens, but {num_ranks} ranks share a sample "
                "(parallel.ulysses x parallel.ring). Use fewer of these ranks, or a larger shape."
            )
