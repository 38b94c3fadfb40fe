"""Encode items with the frozen components of a pipeline: its text encoders and its autoencoder.

The components are loaded when the first item needs them. On an accelerator they stay in host memory, and are on the
device only while they encode the items of a step, one after the other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from omnizoo.modalities.item import Inputs
from omnizoo.models.diffusion.conditioning.first_frame import (
    FirstFrameFeatures,
    FirstFrameLatents,
    continues_frame,
    feature_components,
)
from omnizoo.models.diffusion.conditioning.latents import LatentEncoder, Normalization, read_normalization
from omnizoo.models.diffusion.conditioning.text import TextConditioner
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.ops.device import is_host

HOST = torch.device("cpu")


class FrozenEncoders:
    """Encodes the items of a rank.

    Args:
        folder: The pipeline.
        device: Device of the rank.
        max_text_tokens: Maximum number of text tokens of a prompt; None for that of the pipeline.
        trims_text: Whether masked text tokens are dropped.
    """

    def __init__(
        self, folder: PipelineFolder, device: torch.device, max_text_tokens: int | None, trims_text: bool
    ) -> None:
        self.folder = folder
        self.device = device
        self.max_text_tokens = max_text_tokens
        self.trims_text = trims_text

    @cached_property
    def text(self) -> TextConditioner:
        """The text encoders."""
        return TextConditioner(self.folder, HOST, max_text_tokens=self.max_text_tokens)

    @cached_property
    def autoencoder(self) -> LatentEncoder:
        """The autoencoder."""
        return LatentEncoder(self.folder, HOST)

    @cached_property
    def _published_normalization(self) -> Normalization:
        return read_normalization(self.folder)

    def normalization(self) -> Normalization:
        """Return how latents are normalized. The autoencoder does not stay in memory for it."""
        return self._published_normalization

    @cached_property
    def first_frame_features(self) -> FirstFrameFeatures | None:
        """The vision tower that encodes the first frame as a condition; None if the pipeline has none."""
        has_tower = continues_frame(self.folder) and feature_components(self.folder)
        return FirstFrameFeatures(self.folder, HOST) if has_tower else None

    def encode(self, items: Sequence[Inputs]) -> list[Inputs]:
        """Return `mean`, `std` and the conditions of each item. Items that are encoded already are not changed."""
        encoded = [dict(item) for item in items]
        self._encode_prompts([item for item in encoded if "text" not in item])
        self._encode_pixels([item for item in encoded if "pixels" in item])
        for item in encoded:
            item.pop("prompt", None)
            item.pop("pixels", None)
        return encoded

    def _encode_prompts(self, items: Sequence[Inputs]) -> None:
        """Add the conditions of the prompt to each item."""
        if not items:
            return
        modules = [part for part in self.text.pipeline.components.values() if isinstance(part, nn.Module)]
        with self._on_device(modules, self.text):
            for item in items:
                prompt = bytes(item["prompt"].tolist()).decode()
                condition = self.text.encode(prompt)
                item |= trimmed(condition) if self.trims_text else condition

    def _encode_pixels(self, items: Sequence[Inputs]) -> None:
        """Add the latents to each item, and the conditions of its first frame if the pipeline continues a frame."""
        if not items:
            return
        pixels = [item["pixels"].to(self.device).float() / 127.5 - 1 for item in items]
        with self._on_device([self.autoencoder.vae], self.autoencoder):
            first_frame = FirstFrameLatents(self.folder, self.autoencoder) if continues_frame(self.folder) else None
            for item, values in zip(items, pixels, strict=True):
                posterior = self.autoencoder.encode(values)
                item["mean"] = posterior.mean
                if posterior.std is not None:
                    item["std"] = posterior.std
                if first_frame is not None:
                    item |= first_frame.encode(values)
        features = self.first_frame_features
        if features is None:
            return
        modules = [part for part in features.pipeline.components.values() if isinstance(part, nn.Module)]
        with self._on_device(modules, features):
            for item, values in zip(items, pixels, strict=True):
                item |= features.encode(values)

    @contextmanager
    def _on_device(
        self, modules: Sequence[nn.Module], user: TextConditioner | LatentEncoder | FirstFrameFeatures
    ) -> Iterator[None]:
        """Context manager: move modules to the device of the rank, and back to host memory."""
        if is_host(self.device):
            yield
            return
        user.device = self.device
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module in modules:
                module.to(HOST)


def trimmed(condition: Inputs) -> Inputs:
    """Return the tensors of a prompt without masked text tokens, and without their mask."""
    mask = condition.get("text_mask")
    if mask is None:
        return condition
    kept = {name: tensor for name, tensor in condition.items() if name != "text_mask"}
    return kept | {"text": condition["text"][mask]}
