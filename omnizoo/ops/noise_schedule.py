"""Noise of diffusion and flow-matching models: how much is added, and what the model predicts.

The noise share is 0 for data and 1 for pure noise. In flow matching, the noisy sample is a straight line between both.
Models with epsilon or v prediction use a table of variance-preserving noise levels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Density = Literal["logit_normal", "uniform", "mode"]
Prediction = Literal["flow", "epsilon", "v"]


def interpolate(data: torch.Tensor, noise: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the noisy sample of flow matching. `share` is broadcast: 0 gives the data, 1 the noise."""
    return data + share * (noise - data)


def velocity(data: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the target of flow matching: the derivative of `interpolate` with respect to the share."""
    return noise - data


@dataclass(frozen=True)
class DynamicShift:
    """A shift of the noise share that grows with the number of tokens, as in the scheduler of the family."""

    base_shift: float
    max_shift: float
    base_tokens: int
    max_tokens: int
    is_exponential: bool = True

    def at(self, tokens: int) -> float:
        """Return the shift for a sample with this number of tokens of latents."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = self.base_shift + slope * (tokens - self.base_tokens)
        return math.exp(mu) if self.is_exponential else mu


@dataclass(frozen=True)
class TimeDensity:
    """The distribution of noise shares in training, before the shift."""

    kind: Density = "logit_normal"
    mean: float = 0.0  # of the normal distribution
    std: float = 1.0
    scale: float = 1.29  # of `mode`: larger values prefer the middle

    def share(self, uniform: float) -> float:
        """Return the noise share for a uniform random number in 0..1."""
        if self.kind == "uniform":
            return uniform
        if self.kind == "mode":
            return 1 - uniform - self.scale * (math.cos(math.pi / 2 * uniform) ** 2 - 1 + uniform)
        # The numbers next to 0 and 1 would be infinite.
        inside = min(max(uniform, 2**-53), 1 - 2**-53)
        normal = float(torch.special.ndtri(torch.tensor(inside, dtype=torch.float64)))
        return 1 / (1 + math.exp(-(self.mean + self.std * normal)))


@dataclass(frozen=True)
class NoiseSchedule:
    """How noise is added to samples, and what the model predicts."""

    prediction: Prediction = "flow"
    shift: float | DynamicShift = 1.0  # of flow matching
    signal_shares: Sequence[float] = ()  # of epsilon and v: squared share of the data at each time (alphas_cumprod)

    def share(self, share: float, tokens: int) -> float:
        """Return the noise share at which a sample is trained.

        Args:
            share: The share from `TimeDensity`.
            tokens: Number of tokens of the latents.
        """
        if self.prediction != "flow":
            count = len(self.signal_shares)
            return min(int(share * count), count - 1) / count
        shift = self.shift.at(tokens) if isinstance(self.shift, DynamicShift) else self.shift
        return shift * share / (1 + (shift - 1) * share)

    def signal(self, share: float) -> float:
        """Return the squared share of the data at a noise share, for epsilon and v prediction."""
        return self.signal_shares[round(share * len(self.signal_shares))]

    def add_noise(
        self, data: torch.Tensor, noise: torch.Tensor, shares: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noisy samples, and what the model predicts for them.

        Args:
            data: Samples, `[samples, ...]`.
            noise: Noise of the same shape.
            shares: The noise share of each sample.
        """
        ones = (1,) * (data.ndim - 1)

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).to(data).view(-1, *ones)

        if self.prediction == "flow":
            return interpolate(data, noise, column(shares)), velocity(data, noise)
        signals = [self.signal(share) for share in shares]
        data_scale = column([math.sqrt(signal) for signal in signals])
        noise_scale = column([math.sqrt(1 - signal) for signal in signals])
        noisy = data_scale * data + noise_scale * noise
        if self.prediction == "epsilon":
            return noisy, noise
        return noisy, data_scale * noise - noise_scale * data

    def weight(self, kind: str, share: float, gamma: float = 5.0) -> float:
        """Return the weight of a sample in the loss.

        Args:
            kind: `none`; `min_snr` for epsilon and v; `sigma_sqrt` or `cosmap` for flow matching.
            share: The noise share of the sample.
            gamma: Largest signal-to-noise ratio of `min_snr`.
        """
        if kind == "min_snr":
            signal = self.signal(share)
            ratio = signal / max(1 - signal, 1e-12)
            clipped = min(ratio, gamma)
            return clipped / (ratio + 1) if self.prediction == "v" else clipped / max(ratio, 1e-12)
        if kind == "sigma_sqrt":
            return max(share, 1e-3) ** -2
        if kind == "cosmap":
            return 2 / (math.pi * (1 - 2 * share + 2 * share**2))
        return 1.0
