"""Decoder for continuous items with flow matching. A small network turns noise into a patch, given the hidden state.

Patches consist of pixels, latents of a frozen autoencoder, or values of a series. Any item on a fixed grid works. The
path from data to noise is straight, x(t) = (1 - t) data + t noise, and the network learns its velocity, noise - data.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.modalities.base import CustomFlops, Decoder
from omnizoo.modalities.files.decoding import IMAGE_OPTIONS
from omnizoo.modalities.files.image import image_size, read_image
from omnizoo.modalities.files.pixels import PixelScale, from_patches, read_pixels, to_patches, to_pil_image
from omnizoo.modalities.files.preview import thumbnail
from omnizoo.modalities.frozen_tokenizer import Diffusers, diffusers_package, forward_flops, read_settings
from omnizoo.modalities.item import Inputs, MediaSize
from omnizoo.modalities.media import BadMedia, Media
from omnizoo.modalities.sampling import Sampling
from omnizoo.ops.noise_schedule import interpolate, velocity

SOLVERS = ("euler", "heun")
Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class FlowHead(CustomFlops, Decoder):
    """Decoder for continuous items, with flow matching. A target consists of a data patch, noise and a time.

    Noise and time are sampled from the seed of the item, so they do not depend on the layout.

    Args:
        width: Width of the foundation.
        size: Size of all images (one number, or height and width), or the length of a series as a list of one number.
        config: Config of a diffusers autoencoder whose latents are the data. Its weights are loaded separately.
        folder: Folder of a diffusers autoencoder, instead of `config`.
        patch: Side of a patch, in pixels or latents.
        channels: Channels of the image or series.
        hidden: Width of the velocity network.
        layers: Number of layers of the velocity network.
        solver: `euler`, `heun`, or the name of a flow-matching scheduler of diffusers.
        steps: Number of solver steps per patch.
    """

    item_options = IMAGE_OPTIONS
    no_likelihood_reason = "its likelihood depends on the whole path of a flow, but the model learns only velocities"

    def __init__(
        self,
        width: int,
        size: int | Sequence[int],
        config: dict[str, Any] | None = None,
        folder: str | None = None,
        patch: int = 1,
        channels: int | None = None,
        hidden: int = 256,
        layers: int = 3,
        solver: str = "heun",
        steps: int = 20,
    ) -> None:
        super().__init__()
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.autoencoder: Autoencoder | None = None
        self.scale = PixelScale()
        cell = patch  # pixels per patch
        if config or folder:
            # with a config, the weights are loaded separately
            self.autoencoder = Autoencoder(config) if config else Autoencoder(read_settings(folder), folder)
            cell = patch * self.autoencoder.factor

        self.series = len(self.size) == 1
        if len(self.size) not in (1, 2) or any(side <= 0 or side % cell for side in self.size):
            raise UserError(
                f"decoder.size: {size} is not valid; expected one or two multiples of {cell} that are greater than 0. "
                f"{cell} is the side of a patch."
            )
        if self.series and self.autoencoder:
            raise UserError(
                f"decoder.size: {size} is a series, but the autoencoder needs images. Set height and width."
            )
        if solver not in SOLVERS:
            _scheduler(solver)
        default_channels = 1 if self.series else 3
        if self.autoencoder:
            default_channels = self.autoencoder.channels
        self.channels = channels or default_channels
        if not self.series and self.channels not in (1, 3):
            raise UserError(f"decoder.channels: {self.channels} is not supported for images. Use 1 (gray) or 3.")

        self.patch = patch
        self.grid = tuple(side // cell for side in self.size)
        self.num_patches = math.prod(self.grid)
        data_channels = self.autoencoder.latent_channels if self.autoencoder else self.channels
        self.dim = patch ** len(self.size) * data_channels  # values in a patch
        self.solver = solver
        self.steps = steps
        self.enter = nn.Linear(self.dim, width)
        self.velocity = VelocityNetwork(self.dim, width, hidden, layers)

    @property
    def config(self) -> dict[str, Any] | None:
        """The config of the autoencoder. With it, the same decoder can be rebuilt without the folder."""
        return self.autoencoder.config if self.autoencoder else None

    def measure(self, media: Media) -> MediaSize:
        if self.series:
            self._read_series(media)
        else:
            image_size(media)
        return MediaSize(self.num_patches, cost=self._work)

    @cached_property
    def _work(self) -> float:
        """FLOPs of `targets`.

        Patches of pixels cost almost nothing. However, the cost must not be 0, because items without cost would not be
        distributed over ranks.
        """
        if self.autoencoder is None:
            return float(self.num_patches * self.dim)
        return forward_flops(self.autoencoder, self.dummy_input()["item"].float())

    def prepare(self, media: Media) -> Inputs:
        item = self._read_series(media) if self.series else read_pixels(media, self.size, self.channels)
        noise = media.random.standard_normal((self.num_patches, self.dim), dtype=np.float32)
        time = media.random.random(self.num_patches, dtype=np.float32)
        return {"item": item, "noise": torch.from_numpy(noise), "time": torch.from_numpy(time)}

    def _read_series(self, media: Media) -> torch.Tensor:
        """Return the values of a series, `[length, channels]`."""
        shape = (*self.size, self.channels)
        try:
            values = np.array(media.value, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise BadMedia(f"{media.name}: the values are not numbers: {error}") from None
        allowed_shapes = [shape]
        if self.channels == 1:
            allowed_shapes.append(shape[:1])
        if values.shape not in allowed_shapes:
            raise BadMedia(f"{media.name}: the shape is {list(values.shape)}; expected {list(shape)}")
        if not np.isfinite(values).all():
            raise BadMedia(f"{media.name}: some values are not finite")
        return torch.from_numpy(values.reshape(shape))

    def dummy_input(self) -> Inputs:
        shape = (*self.size, self.channels) if self.series else (self.channels, *self.size)
        item = torch.zeros(shape, dtype=torch.float32 if self.series else torch.uint8)
        noise = torch.zeros(self.num_patches, self.dim)
        return {"item": item, "noise": noise, "time": torch.zeros(self.num_patches)}

    def modules_run_by(self, method: Literal["embed", "loss"]) -> Iterable[nn.Module]:
        return [self.enter if method == "embed" else self.velocity]

    @torch.no_grad()
    def targets(self, items: Sequence[Inputs]) -> torch.Tensor:
        device = self.enter.weight.device
        targets = []
        for item in items:
            noise = item["noise"].to(device)
            time = item["time"].to(device)
            data = self._patches(item["item"], noise)
            targets.append(torch.cat([data, noise, time[:, None]], 1))
        return torch.cat(targets)

    def _patches(self, item: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the data patches `[patches, dim]`, with the dtype and device of `like`."""
        if self.autoencoder:
            values = self.scale.values(item, self.autoencoder.like)
            item = self.autoencoder.encode(values).movedim(0, -1)
        elif not self.series:
            item = self.scale.values(item, like).movedim(0, -1)
        return to_patches(item.to(like), self.patch)

    def embed(self, targets: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.enter(targets[:, : self.dim].to(self.enter.weight.dtype))
        return embedded

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        data, noise, time = targets.split([self.dim, self.dim, 1], -1)
        predicted: torch.Tensor = self.velocity(interpolate(data, noise, time), time, hidden)
        precise = torch.promote_types(predicted.dtype, torch.float32)
        error: torch.Tensor = predicted.to(precise) - velocity(data, noise).to(precise)
        return error.square().mean(-1)

    def sample(self, hidden: torch.Tensor, targets: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
        """Sample the next patch.

        The temperature scales the initial noise. With temperature 0, sampling is deterministic.
        """
        if len(targets) == self.num_patches:
            return None
        generator_device = sampling.generator.device if sampling.generator else hidden.device
        noise = torch.randn(1, self.dim, generator=sampling.generator, device=generator_device)
        noise = noise.to(hidden.device, targets.dtype) * sampling.temperature

        def velocity(patch: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            predicted: torch.Tensor = self.velocity(patch, time.view(1, 1), hidden[None])
            return predicted

        patch = solve(velocity, noise, self.solver, self.steps)
        return torch.cat([patch[0], patch.new_zeros(self.dim + 1)])  # a clean target: no noise, time 0

    @torch.no_grad()
    def render(self, targets: torch.Tensor) -> Any:
        """Return a PIL image, or the values `[length]` or `[length, channels]` of a series."""
        values = from_patches(targets[:, : self.dim], self.grid, self.patch)
        if self.series:
            return values.squeeze(-1).double().cpu().numpy()
        values = values.movedim(-1, 0)
        if self.autoencoder:
            values = self.autoencoder.decode(values.to(self.autoencoder.like))
        return to_pil_image(self.scale.pixels(values))

    def save(self, item: Any, stem: str) -> str:
        if self.series:
            np.save(f"{stem}.npy", item, allow_pickle=False)
            return f"{stem}.npy"
        item.save(f"{stem}.png")
        return f"{stem}.png"

    def preview(self, media: Media) -> str:
        return super().preview(media) if self.series else thumbnail(read_image(media, self.channels), media.name)


class VelocityNetwork(nn.Module):
    """An MLP on the noisy patch. Its layer norms are scaled and shifted by the hidden state and the time."""

    def __init__(self, dim: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, hidden)
        self.condition = nn.Linear(width, hidden)
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.layers = nn.ModuleList(Layer(hidden, hidden * 2) for _ in range(layers))
        self.leave = Layer(hidden, dim, residual=False)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the velocity `[N, dim]`.

        Args:
            noisy: `[N, dim]`, patches at `time`.
            time: `[N, 1]`, in 0..1.
            hidden: `[N, width]`, hidden states of the foundation.
        """
        time_waves = waves(time, self.enter.out_features).to(hidden.dtype)
        condition = F.silu(self.condition(hidden) + self.time(time_waves))
        x: torch.Tensor = self.enter(noisy.to(hidden.dtype))
        for layer in [*self.layers, self.leave]:
            x = layer(x, condition)
        return x


def waves(time: torch.Tensor, count: int) -> torch.Tensor:
    """Return sines and cosines `[N, count]` of the time `[N, 1]`.

    The highest frequency has 100 periods in 0..1, so fp32 or wider is needed.
    """
    time = time.to(torch.promote_types(time.dtype, torch.float32))
    exponent = torch.linspace(0, 1, (count + 1) // 2, dtype=time.dtype, device=time.device)
    angle = time * 2 * math.pi * 100**exponent
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :count]


class Layer(nn.Module):
    """A residual layer, x + gate(c) * MLP(norm(x) * (1 + scale(c)) + shift(c)), for the input x and the condition c.

    The last layer has `residual=False`: a linear map replaces the MLP, and there is no gate and no residual connection.
    """

    def __init__(self, hidden: int, out: int, residual: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.modulate = nn.Linear(hidden, (3 if residual else 2) * hidden)
        mlp = nn.Sequential(nn.Linear(hidden, out), nn.SiLU(), nn.Linear(out, hidden))
        self.mlp = mlp if residual else nn.Linear(hidden, out)
        self.residual = residual
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.modulate.weight, std=0.02)  # nonzero, so that the condition has an effect from the start

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, *gate = self.modulate(condition).chunk(3 if self.residual else 2, -1)
        out: torch.Tensor = self.mlp(self.norm(x) * (1 + scale) + shift)
        return x + gate[0] * out if gate else out


@torch.no_grad()
def solve(velocity: Velocity, noise: torch.Tensor, solver: str, steps: int) -> torch.Tensor:
    """Integrate `velocity(x, time)` from `noise` at time 1 to data at time 0."""
    if solver not in SOLVERS:
        return _solve_by_diffusers(velocity, noise, solver, steps)
    x = noise
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64).to(x)
    for time, after in pairwise(times):
        slope = velocity(x, time).to(x)
        if solver == "heun":  # mean of the slopes at both ends of the step
            slope = (slope + velocity(x + (after - time) * slope, after).to(x)) / 2
        x = x + (after - time) * slope
    return x


def _solve_by_diffusers(velocity: Velocity, noise: torch.Tensor, name: str, steps: int) -> torch.Tensor:
    """Integrate like `solve`, with a scheduler of diffusers."""
    scheduler = _scheduler(name)
    scheduler.set_timesteps(steps)
    x = noise
    for time in scheduler.timesteps:
        slope = velocity(x, (time / scheduler.config.num_train_timesteps).to(x))
        x = scheduler.step(slope, time, x).prev_sample
    return x.to(noise)


def _scheduler(name: str) -> Any:
    """Build a scheduler of diffusers by the name of its class."""
    package = diffusers_package(name)
    scheduler = getattr(package, name, None)
    if not (isinstance(scheduler, type) and issubclass(scheduler, package.SchedulerMixin)):
        raise UserError(f"decoder.solver: {name!r} is unknown. Use {', '.join(SOLVERS)} or a scheduler of diffusers.")
    return scheduler()


class Autoencoder(Diffusers):
    """`AutoencoderKL` of diffusers. It converts between images and latents of about unit variance.

    An image is converted to the mean of its latent distribution, without sampling.
    """

    def __init__(self, config: dict[str, Any], folder: str | None = None) -> None:
        if "_class_name" not in config:
            raise UserError(f"decoder.path: {folder} is not a diffusers model folder: config.json has no _class_name")
        super().__init__(config, folder)
        self.config = config
        settings = self.model.config
        if "latent_channels" not in settings or "scaling_factor" not in settings or hasattr(self.model, "quantize"):
            raise UserError(f"decoder.path: {config['_class_name']} is not an autoencoder with continuous latents")
        self.factor = 2 ** (len(settings.block_out_channels) - 1)
        self.channels = settings.in_channels
        self.latent_channels = settings.latent_channels
        self.scale = settings.scaling_factor
        self.shift = settings.get("shift_factor") or 0.0

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Convert values `[channels, height, width]` in -1..1 to latents `[latent channels, rows, columns]`."""
        mean = self.model.encode(values[None]).latent_dist.mode()[0]
        latents: torch.Tensor = (mean - self.shift) * self.scale
        return latents

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents to values `[channels, height, width]`, the inverse of `encode`."""
        values: torch.Tensor = self.model.decode(latents[None] / self.scale + self.shift).sample[0]
        return values
