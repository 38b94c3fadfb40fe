"""The loss of a denoiser: the squared error of its prediction, as a mean over the values of each sample."""

import torch

from omnizoo.balancing.step_plan import TEXT, StepTotals
from omnizoo.config.errors import UserError
from omnizoo.ops.noise_schedule import Density, NoiseSchedule, Prediction, TimeDensity
from omnizoo.training.denoising.noisy_batch import NoiseOptions, NoisyBatch
from omnizoo.training.losses.base import Loss


class Denoise(Loss):
    """Squared error between prediction and target. Its count is the number of samples.

    Args:
        density: Distribution of noise shares: `logit_normal`, `uniform` or `mode`. Default: `logit_normal` for flow
            matching, `uniform` otherwise.
        mean: Mean of the normal distribution of `logit_normal`.
        std: Standard deviation of `logit_normal`.
        scale: How much `mode` prefers the middle.
        shift: Shift of noise shares. Default: that of the scheduler, which may grow with the number of tokens.
        weighting: `none`; `min_snr` for epsilon and v; `sigma_sqrt` or `cosmap` for flow matching.
        snr_gamma: Largest signal-to-noise ratio of `min_snr`.
        prediction: What the model predicts: `flow`, `epsilon` or `v`. Default: that of the scheduler.
        guidance: Guidance scale that a guidance-distilled model receives in training.
    """

    def __init__(
        self,
        density: Density | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        scale: float = 1.29,
        shift: float | None = None,
        weighting: str = "none",
        snr_gamma: float = 5.0,
        prediction: Prediction | None = None,
        guidance: float = 1.0,
    ) -> None:
        self.density = density
        self.mean = mean
        self.std = std
        self.scale = scale
        self.shift = shift
        self.weighting = weighting
        self.snr_gamma = snr_gamma
        self.prediction = prediction
        self.guidance = guidance

    def noise_options(
        self, schedule: NoiseSchedule, seed: int, noise_range: tuple[float, float] = (0.0, 1.0)
    ) -> NoiseOptions:
        """Return how noise is sampled.

        Args:
            schedule: The noise of the model.
            seed: Seed of the run.
            noise_range: Lowest and highest noise share that the model is trained on.

        Raises:
            UserError: If the weighting does not apply to what the model predicts.
        """
        is_flow = schedule.prediction == "flow"
        allowed = ("none", "sigma_sqrt", "cosmap") if is_flow else ("none", "min_snr")
        if self.weighting not in allowed:
            raise UserError(
                f"train.losses: weighting {self.weighting} does not apply to a model that predicts "
                f"{schedule.prediction}. Use one of {', '.join(allowed)}."
            )
        density = self.density or ("logit_normal" if is_flow else "uniform")
        return NoiseOptions(
            schedule=schedule,
            density=TimeDensity(density, self.mean, self.std, self.scale),
            weighting=self.weighting,
            snr_gamma=self.snr_gamma,
            seed=seed,
            noise_range=noise_range,
        )

    def count(self, totals: StepTotals) -> float:
        """Return the number of samples."""
        return sum(count for name, count in totals.targets.items() if name != TEXT)

    def from_prediction(self, prediction: torch.Tensor, batch: NoisyBatch) -> torch.Tensor:
        """Return the summed errors of the samples."""
        error = (prediction.to(batch.target) - batch.target).square()
        return batch.sum(error.flatten(1).mean(1))
