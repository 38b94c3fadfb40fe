"""The noisy samples of a micro-batch, as a denoiser and its losses receive them.

Noise, noise share and the sample of the autoencoder's posterior depend only on `train.seed` and on the sample's id,
which contains its row and epoch. They are therefore the same on every rank, in every layout and after a resume.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnizoo.config.errors import UserError
from omnizoo.modalities.item import Inputs
from omnizoo.models.diffusion.conditioning.latents import Normalization, Posterior
from omnizoo.ops.device import to_device
from omnizoo.ops.noise_schedule import NoiseSchedule, TimeDensity
from omnizoo.training.losses.source_sums import SourceSums

NORMALIZED = "latents"  # latents that are normalized and not sampled, of simulated samples
LATENT_NAMES = ("mean", "std", NORMALIZED)  # tensors of an encoded sample that are not conditions
SOURCES = ("pixels", "prompt")  # tensors of an item that is not encoded yet


@dataclass(frozen=True)
class NoiseOptions:
    """How noise is sampled in training."""

    schedule: NoiseSchedule
    density: TimeDensity
    weighting: str
    snr_gamma: float
    seed: int
    noise_range: tuple[float, float] = (0.0, 1.0)  # lowest and highest noise share

    def share(self, uniform: float, tokens: int) -> float:
        """Return the noise share of a sample: the quantile `uniform` of the density within the range.

        Args:
            uniform: A random number from 0 to 1.
            tokens: Number of tokens of the latents.
        """
        if self.noise_range == (0.0, 1.0):
            return self.schedule.share(self.density.share(uniform), tokens)
        low, high = (self._quantile_of(bound, tokens) for bound in self.noise_range)
        return self.schedule.share(self.density.share(low + uniform * (high - low)), tokens)

    def _quantile_of(self, bound: float, tokens: int) -> float:
        """Return the quantile at which the noise share reaches a bound, by bisection."""

        def share(quantile: float) -> float:
            return self.schedule.share(self.density.share(quantile), tokens)

        low, high = (0.0, 1.0) if share(0.0) <= share(1.0) else (1.0, 0.0)  # the density `mode` is decreasing
        for _ in range(60):
            middle = (low + high) / 2
            if share(middle) < bound:
                low = middle
            else:
                high = middle
        return high


@dataclass(frozen=True)
class NoisyBatch:
    """The noisy samples of a micro-batch on this rank's device.

    All ranks of a sequence-parallel group have the same samples. A sum over samples is divided by their number, so that
    the sum over all ranks is right.
    """

    noisy: torch.Tensor  # [samples, channels, (frames,) height, width]
    target: torch.Tensor  # what the model predicts, the same shape
    shares: torch.Tensor  # [samples], noise shares
    weights: torch.Tensor  # [samples], weights in the loss; 0 for a dummy sample
    condition: Mapping[str, torch.Tensor]  # [samples, ...] each
    num_ranks: int  # number of ranks that have these samples
    source_sums: SourceSums  # splits sums over samples by source

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of a value per sample, as this rank's part of the sum over all ranks."""
        weighted = values * self.weights / self.num_ranks
        total = weighted.sum()
        self.source_sums.add(total, weighted, torch.arange(len(values), device=values.device))
        return total


class SampleNoise:
    """The random numbers of one sample."""

    def __init__(self, seed: int, sample_id: str) -> None:
        digest = hashlib.blake2b(f"noise/{seed}/{sample_id}".encode(), digest_size=16).digest()
        self._generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        self.uniform = float(self._generator.random())

    def normal(self, shape: Sequence[int]) -> torch.Tensor:
        """Return the next standard normal numbers."""
        # NumPy draws the same numbers in fp32 and fp64 runs.
        return torch.from_numpy(self._generator.standard_normal(tuple(shape), dtype=np.float32))


def add_noise(
    samples: Sequence[Inputs],
    sample_ids: Sequence[str],
    tokens: int,
    normalization: Callable[[], Normalization],
    options: NoiseOptions,
    device: torch.device,
    dtype: torch.dtype,
    num_ranks: int,
    source_sums: SourceSums,
) -> NoisyBatch:
    """Return the noisy batch for the encoded samples of a micro-batch.

    Args:
        samples: `mean`, and `std` of a posterior, and conditions, of each sample.
        sample_ids: The ids of the samples. Empty for a dummy sample, which gets the weight 0.
        tokens: Number of tokens of the latents of one sample.
        normalization: Returns the normalization of latents.
        options: How noise is sampled.
        device: Device of the batch.
        dtype: Precision of the noisy samples: fp32, or fp64.
        num_ranks: Number of ranks that have these samples.
        source_sums: Splits sums over samples by source.
    """
    data = []
    noise = []
    shares = []
    for sample, sample_id in zip(samples, sample_ids or [""], strict=True):
        random = SampleNoise(options.seed, sample_id)
        shares.append(options.share(random.uniform, tokens))
        latents = sample.get(NORMALIZED)
        if latents is None:
            posterior = Posterior(sample["mean"], sample.get("std"))
            latents = normalization().apply(posterior.sample(random.normal(sample["mean"].shape)))
        data.append(latents)
        noise.append(random.normal(latents.shape))

    # All of this is computed on the host, so the numbers do not depend on the device, and nothing waits for it.
    noisy, target = options.schedule.add_noise(torch.stack(data).to(dtype), torch.stack(noise).to(dtype), shares)
    weights = [options.schedule.weight(options.weighting, share, options.snr_gamma) for share in shares]
    if not sample_ids:
        weights = [0.0]
    return NoisyBatch(
        noisy=to_device(noisy, device),
        target=to_device(target, device),
        shares=to_device(torch.tensor(shares, dtype=torch.float64).to(dtype), device),
        weights=to_device(torch.tensor(weights, dtype=torch.float64).to(dtype), device),
        condition={name: to_device(value, device) for name, value in stack_conditions(samples).items()},
        num_ranks=num_ranks,
        source_sums=source_sums,
    )


def stack_conditions(samples: Sequence[Inputs]) -> Inputs:
    """Return the conditions of samples, stacked. A mask that only some samples have is True for the others."""
    names = {name for sample in samples for name in sample if name not in (*LATENT_NAMES, *SOURCES)}
    stacked = {}
    for name in sorted(names):
        template = next(sample[name] for sample in samples if name in sample)
        values = []
        for sample in samples:
            value = sample.get(name)
            if value is None and template.dtype == torch.bool:
                value = torch.ones_like(template)
            if value is None or value.shape != template.shape:
                raise UserError(
                    f"data: `{name}` has different shapes in samples of a pack. Encode all rows with the same model."
                )
            values.append(value)
        stacked[name] = torch.stack(values)
    return stacked
