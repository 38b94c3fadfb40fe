"""Encode pixels with the autoencoder of a pipeline, and normalize latents like the pipeline."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from omnizoo.config.errors import UserError, first_line, is_out_of_memory
from omnizoo.models.diffusion.conditioning.components import component_hash, frozen_computation, load_component
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder

VAE = "vae"  # component name in all pipelines


@dataclass(frozen=True)
class Posterior:
    """Distribution of the latents of one item, before normalization."""

    mean: torch.Tensor  # [channels, (frames,) height, width]
    std: torch.Tensor | None  # the same shape; None if the autoencoder is deterministic

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return latents for standard normal `noise`, in its precision."""
        mean = self.mean.to(noise)
        return mean if self.std is None else mean + self.std.to(noise) * noise


@dataclass(frozen=True)
class Normalization:
    """How a pipeline normalizes latents: (patches - shift) * scale, with one value for each channel or for all."""

    shift: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    patch: int = 1  # side of the patches whose values become channels before normalization

    @classmethod
    def of(cls, vae: Any) -> "Normalization":
        """Return the normalization that the config and the buffers of an autoencoder describe."""
        batch_norm = getattr(vae, "bn", None)
        if batch_norm is not None:
            variance = batch_norm.running_var.double() + vae.config.batch_norm_eps
            channels = batch_norm.running_mean.numel() // vae.config.latent_channels
            scale = variance.rsqrt()
            return cls(_values(batch_norm.running_mean), _values(scale), math.isqrt(channels))

        factor = float(getattr(vae.config, "scaling_factor", None) or 1.0)
        mean = getattr(vae.config, "latents_mean", None)
        std = getattr(vae.config, "latents_std", None)
        if mean is None:  # some autoencoders have buffers
            buffers = dict(vae.named_buffers())
            mean = buffers.get("latents_mean")
            std = buffers.get("latents_std")
        if mean is not None and std is not None:
            scale = factor / torch.as_tensor(std).double()
            return cls(_values(torch.as_tensor(mean)), _values(scale))
        shift = float(getattr(vae.config, "shift_factor", None) or 0.0)
        return cls((shift,), (factor,))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Normalization":
        """Return the normalization with the fields that `to_json` returned."""
        return cls(tuple(fields["shift"]), tuple(fields["scale"]), fields["patch"])

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for a JSON file."""
        return asdict(self)

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalize the latents of one item.

        Args:
            latents: `[channels, (frames,) height, width]`.

        Returns:
            `[channels * patch**2, (frames,) height / patch, width / patch]`, at least fp32.
        """
        patches = self._to_patches(latents.to(torch.promote_types(latents.dtype, torch.float32)))
        shift, scale = self._vectors(patches)
        normalized: torch.Tensor = (patches - shift) * scale
        return normalized

    def undo(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the latents of one item whose normalization is `normalized`, at least in fp32."""
        precise = normalized.to(torch.promote_types(normalized.dtype, torch.float32))
        shift, scale = self._vectors(precise)
        patches: torch.Tensor = precise / scale + shift
        return self._from_patches(patches)

    def _vectors(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shift and scale as tensors that broadcast over the channels, which are the first dimension."""
        ones = (1,) * (patches.ndim - 1)
        shift = torch.tensor(self.shift, dtype=torch.float64).to(patches).view(-1, *ones)
        scale = torch.tensor(self.scale, dtype=torch.float64).to(patches).view(-1, *ones)
        return shift, scale

    def _to_patches(self, latents: torch.Tensor) -> torch.Tensor:
        """Return `[channels, ..., height, width]` with each square of `patch` x `patch` values as channels."""
        if self.patch == 1:
            return latents
        columns: torch.Tensor = latents.unflatten(-1, (-1, self.patch))
        rows: torch.Tensor = columns.unflatten(-3, (-1, self.patch))  # [channels, ..., rows, patch, columns, patch]
        return rows.movedim((-3, -1), (1, 2)).flatten(0, 2)

    def _from_patches(self, patches: torch.Tensor) -> torch.Tensor:
        """Invert `_to_patches`."""
        if self.patch == 1:
            return patches
        squares: torch.Tensor = patches.unflatten(0, (-1, self.patch, self.patch)).movedim((1, 2), (-3, -1))
        return squares.flatten(-2).flatten(-3, -2)


class LatentEncoder:
    """The autoencoder of a pipeline.

    Args:
        folder: The pipeline.
        device: Device of the autoencoder.
        dtype: Precision of the autoencoder; None for the precision of its files.

    Example:
        >>> encoder = LatentEncoder(PipelineFolder.read("FLUX.1-dev"), torch.device("cuda"))
        >>> posterior = encoder.encode(pixels)  # [3, 1024, 1024] -> mean and std [16, 128, 128]
        >>> latents = encoder.normalization.apply(posterior.sample(noise))
    """

    def __init__(self, folder: PipelineFolder, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        self.device = device
        self.vae: Any = load_component(folder.component(VAE), device, dtype)
        self.normalization = Normalization.of(self.vae)

    @cached_property
    def has_frames(self) -> bool:
        """Whether the autoencoder convolves over frames. An image is then a clip of one frame."""
        encoder = getattr(self.vae, "encoder", self.vae)
        return any(isinstance(module, torch.nn.Conv3d) for module in encoder.modules())

    def encode(self, pixels: torch.Tensor) -> Posterior:
        """Return the distribution of the latents of one item. Items are not batched, because that changes rounding.

        Args:
            pixels: `[3, height, width]` or `[3, frames, height, width]`, values from -1 to 1.

        Returns:
            Mean and std with as many dimensions as `pixels`.

        Raises:
            UserError: If the autoencoder cannot encode this shape.
        """
        is_clip = pixels.ndim == 4
        if is_clip and not self.has_frames:
            raise UserError(f"{self.folder.key}: {type(self.vae).__name__} encodes single images, not clips")
        batch = pixels[None] if is_clip or not self.has_frames else pixels[None, :, None]
        batch = batch.to(self.device, self.vae.dtype)
        with frozen_computation(self.device):
            try:
                encoded = self.vae.encode(batch)
            except (RuntimeError, ValueError) as error:
                if is_out_of_memory(error):
                    raise
                shape = " x ".join(map(str, pixels.shape))
                class_name = type(self.vae).__name__
                raise UserError(
                    f"{self.folder.key}: {class_name} cannot encode an item of {shape}: {first_line(error)}"
                ) from error
        distribution = getattr(encoded, "latent_dist", None)
        if distribution is None:
            return Posterior(_item(encoded.latent, pixels.ndim), None)
        return Posterior(_item(distribution.mean, pixels.ndim), _item(distribution.std, pixels.ndim))


def read_normalization(folder: PipelineFolder) -> Normalization:
    """Return how a pipeline normalizes latents, without keeping the weights of the autoencoder."""
    return Normalization.of(load_component(folder.component(VAE), torch.device("cpu")))


def latent_hash(folder: PipelineFolder) -> dict[str, str]:
    """Return the hash of the autoencoder, keyed by component name."""
    return {VAE: component_hash(folder.component(VAE))}


def _item(batch: torch.Tensor, num_dims: int) -> torch.Tensor:
    """Return the only item of a batch, without frames if the pixels had none."""
    item = batch[0]
    return item if item.ndim == num_dims else item[:, 0]


def _values(tensor: torch.Tensor) -> tuple[float, ...]:
    return tuple(tensor.double().flatten().tolist())
