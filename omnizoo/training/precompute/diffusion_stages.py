"""Stages for a diffusion transformer: latents, prompts, and features of first frames."""

from collections.abc import Mapping
from functools import partial

import torch

from omnizoo.modalities.item import Inputs, MediaItem
from omnizoo.models.diffusion.conditioning.first_frame import (
    FirstFrameFeatures,
    FirstFrameLatents,
    continues_frame,
    feature_components,
    feature_hash,
)
from omnizoo.models.diffusion.conditioning.latents import LatentEncoder, latent_hash
from omnizoo.models.diffusion.conditioning.text import TextConditioner, text_hash
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.training.precompute.stages import LoadedStage, RowItems, Stage

PIXELS = "pixels"  # prepared item of a diffusion transformer: bytes


class LatentStage(Stage):
    """Encodes pixels to the mean and standard deviation of their latents, and first frames to conditions."""

    name = "latents"

    def __init__(self, folder: PipelineFolder) -> None:
        self.folder = folder
        self.fingerprints = latent_hash(folder)

    def load(self, device: torch.device) -> LoadedStage:
        """Load the autoencoder."""
        encoder = LatentEncoder(self.folder, device)
        first_frame = FirstFrameLatents(self.folder, encoder) if continues_frame(self.folder) else None

        def encode(row: RowItems, inputs: Mapping[int, Inputs]) -> Inputs:
            pixels = to_values(inputs[0][PIXELS].to(device))
            posterior = encoder.encode(pixels)
            tensors = {"mean": posterior.mean}
            if posterior.std is not None:
                tensors["std"] = posterior.std
            if first_frame is not None:
                tensors |= first_frame.encode(pixels)
            return tensors

        return LoadedStage(encode)


class TextStage(Stage):
    """Encodes prompts.

    Args:
        folder: The pipeline.
        max_text_tokens: Maximum number of text tokens; None for the default of the pipeline.
        trims_text: Whether masked tokens are dropped.
    """

    name = "text"
    encodes_prompts = True

    def __init__(self, folder: PipelineFolder, max_text_tokens: int | None, trims_text: bool) -> None:
        self.folder = folder
        self.max_text_tokens = max_text_tokens
        self.trims_text = trims_text
        self.fingerprints = text_hash(folder)

    def load(self, device: torch.device) -> LoadedStage:
        """Load the text encoders."""
        conditioner = TextConditioner(self.folder, device, max_text_tokens=self.max_text_tokens)

        def encode(prompt: str) -> Inputs:
            tensors = conditioner.encode(prompt)
            if self.trims_text and "text_mask" in tensors:
                mask = tensors.pop("text_mask")
                tensors["text"] = tensors["text"][mask]
            return tensors

        return LoadedStage(lambda row, inputs: encode(row.prompt), partial(encode, ""))

    def decodes(self, item: MediaItem) -> bool:
        """Media are not needed."""
        return False


class FeatureStage(Stage):
    """Encodes first frames to features with the vision tower of a pipeline."""

    name = "features"

    def __init__(self, folder: PipelineFolder) -> None:
        self.folder = folder
        self.fingerprints = feature_hash(folder)

    def load(self, device: torch.device) -> LoadedStage:
        """Load the vision tower."""
        tower = FirstFrameFeatures(self.folder, device)

        def encode(row: RowItems, inputs: Mapping[int, Inputs]) -> Inputs:
            return tower.encode(to_values(inputs[0][PIXELS]))

        return LoadedStage(encode)


def diffusion_stages(folder: PipelineFolder, max_text_tokens: int | None, trims_text: bool) -> list[Stage]:
    """Return the stages of a pipeline: latents first, then text and features.

    Args:
        folder: The pipeline.
        max_text_tokens: Maximum number of text tokens (`data.text_tokens`).
        trims_text: Whether masked text tokens are dropped (`DiffusionRecipe.trims_text`).
    """
    stages: list[Stage] = [LatentStage(folder), TextStage(folder, max_text_tokens, trims_text)]
    if continues_frame(folder) and feature_components(folder):
        stages.append(FeatureStage(folder))
    return stages


def diffusion_hashes(folder: PipelineFolder) -> dict[str, str]:
    """Return the hash of each frozen component of a pipeline, by name."""
    stages = diffusion_stages(folder, max_text_tokens=None, trims_text=False)
    return {name: value for stage in stages for name, value in stage.fingerprints.items()}


def to_values(pixels: torch.Tensor) -> torch.Tensor:
    """Return bytes as floats from -1 to 1."""
    return pixels.float() / 127.5 - 1
