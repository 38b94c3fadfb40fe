"""Encode the first frame of a clip as a condition, exactly like a pipeline that continues a frame.

The pipeline's own `prepare_latents` and `encode_image` do the work. Its autoencoder gives the latents of the frame, and
its vision tower, if it has one, the features. They are separate classes, so that one model is loaded at a time.
"""

import inspect
from typing import Any

import torch

from omnizoo.config.errors import UserError
from omnizoo.modalities.files.pixels import to_pil_image
from omnizoo.models.diffusion.conditioning.components import (
    assemble_pipeline,
    component_hash,
    frozen_computation,
    load_components,
)
from omnizoo.models.diffusion.conditioning.latents import VAE, LatentEncoder
from omnizoo.models.diffusion.conditioning.text import Condition, text_components
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder

# Parameters of `prepare_latents` in pipelines that continue a frame, after the frame itself.
FRAME_PARAMETERS = ("batch_size", "num_channels_latents", "height", "width", "num_frames")


def continues_frame(folder: PipelineFolder) -> bool:
    """Whether the transformer of a pipeline is conditioned on the latents of the first frame."""
    parameters = list(inspect.signature(folder.pipeline_class.prepare_latents).parameters)
    return tuple(parameters[2:7]) == FRAME_PARAMETERS


class FirstFrameLatents:
    """Encodes the first frame with the autoencoder of a pipeline: a mask and normalized latents.

    Args:
        folder: The pipeline.
        encoder: Its autoencoder.
    """

    def __init__(self, folder: PipelineFolder, encoder: LatentEncoder) -> None:
        self.folder = folder
        self.encoder = encoder
        self.pipeline = assemble_pipeline(folder, {VAE: encoder.vae})

    def encode(self, clip: torch.Tensor) -> Condition:
        """Return `reference_latents` [channels, frames, height, width] for a clip in pixels.

        Args:
            clip: `[3, frames, height, width]`, values from -1 to 1. Only its first frame is encoded.

        Raises:
            UserError: If the transformer needs another condition than the pipeline prepares.
        """
        _, num_frames, height, width = clip.shape
        device = self.encoder.device
        channels = len(self.encoder.normalization.shift)
        with frozen_computation(device):
            _, reference, *others = self.pipeline.prepare_latents(
                clip[None, :, 0].to(device, torch.float32),
                batch_size=1,
                num_channels_latents=channels,
                height=height,
                width=width,
                num_frames=num_frames,
                dtype=torch.float32,
                device=device,
                latents=torch.zeros((), device=device),  # otherwise, noise changes the global generator
            )
        expected = self._reference_channels(channels)
        if others or reference.shape[1] != expected:
            raise UserError(
                f"{self.folder.key}: {self.folder.class_name} prepares a condition of {reference.shape[1]} channels, "
                f"but its transformer has {expected}. This variant of the pipeline is not supported."
            )
        return {"reference_latents": reference[0]}

    def _reference_channels(self, latent_channels: int) -> int:
        """Return the number of input channels of the transformer that are not noisy latents."""
        denoiser = next(iter(self.folder.denoisers.values()))
        num_channels: int = denoiser.config["in_channels"]
        return num_channels - latent_channels


class FirstFrameFeatures:
    """Encodes the first frame with the vision tower of a pipeline.

    Args:
        folder: The pipeline.
        device: Device of the vision tower.
        dtype: Precision of the vision tower; None for the precision of its files.
    """

    def __init__(self, folder: PipelineFolder, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
        loaded = load_components(folder, feature_components(folder), device, dtype)
        self.pipeline = assemble_pipeline(folder, loaded)

    def encode(self, clip: torch.Tensor) -> Condition:
        """Return `reference_features` [tokens, width] for the first frame of a clip `[3, frames, height, width]`."""
        pixels = ((clip[:, 0].float() + 1) * 127.5).round().to(torch.uint8)
        frame: Any = to_pil_image(pixels.movedim(0, -1).cpu().numpy())
        with frozen_computation(self.device):
            return {"reference_features": self.pipeline.encode_image(frame, self.device)[0]}


def feature_components(folder: PipelineFolder) -> list[str]:
    """Return the names of the vision tower and its processor; an empty list if the pipeline has none."""
    text = text_components(folder)
    return [name for name, part in folder.components.items() if part.library == "transformers" and name not in text]


def feature_hash(folder: PipelineFolder) -> dict[str, str]:
    """Return the hash of the vision tower and its processor, keyed by component name."""
    return {name: component_hash(folder.component(name)) for name in feature_components(folder)}
