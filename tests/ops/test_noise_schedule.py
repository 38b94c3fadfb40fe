"""Noise of training against the schedulers and training utilities of diffusers."""

import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from omnizoo.config.errors import UserError
from omnizoo.modalities.scheduler_config import read_noise_schedule
from omnizoo.ops.noise_schedule import NoiseSchedule, TimeDensity

SHARES = (0.05, 0.3, 0.5, 0.77, 1.0)


def read(scheduler: diffusers.SchedulerMixin, **options: object) -> NoiseSchedule:
    return read_noise_schedule(type(scheduler).__name__, dict(scheduler.config), "model.path", **options)


def test_static_shift_gives_the_table_of_the_scheduler() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    schedule = read(scheduler)
    shifted = [schedule.share(number / 1000, tokens=1) for number in range(1000, 0, -1)]
    np.testing.assert_allclose(shifted, scheduler.sigmas.double(), rtol=1e-6)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_dynamic_shift_equals_the_shift_in_sampling(tokens: int, kind: str) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, time_shift_type=kind
    )
    sigmas = np.array(SHARES)
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(tokens))
    shares = [read(scheduler).share(share, tokens) for share in SHARES]
    np.testing.assert_allclose(shares, scheduler.sigmas[:-1].double(), rtol=1e-6)


def test_shift_of_a_solver_with_flow_sigmas_is_read() -> None:
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    assert read(scheduler) == NoiseSchedule("flow", 5.0)
    assert read(scheduler, shift=2.0).shift == 2.0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_and_target_equal_those_of_the_scheduler(prediction: str) -> None:
    scheduler = diffusers.DDPMScheduler(
        prediction_type=prediction, beta_schedule="scaled_linear", rescale_betas_zero_snr=prediction != "epsilon"
    )
    schedule = read(scheduler)
    data, noise = torch.randn(2, 3, 4, 5, 5).unbind()
    shares = [schedule.share(uniform, tokens=1) for uniform in (0.0, 0.5, 0.9999)]
    times = torch.tensor([round(1000 * share) for share in shares])
    noisy, target = schedule.add_noise(data, noise, shares)
    torch.testing.assert_close(noisy, scheduler.add_noise(data, noise, times), rtol=1e-5, atol=1e-5)
    expected = noise if prediction == "epsilon" else scheduler.get_velocity(data, noise, times)
    torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-5)

    snr = compute_snr(scheduler, times).clamp(min=1e-12)
    clipped = snr.clamp(max=5.0)
    weights = clipped / snr if prediction == "epsilon" else clipped / (snr + 1)
    for share, weight in zip(shares, weights.tolist(), strict=True):
        assert schedule.weight("min_snr", share, 5.0) == pytest.approx(weight, rel=1e-3, abs=1e-6)


def test_flow_is_a_line_from_data_to_noise() -> None:
    data, noise = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    noisy, target = NoiseSchedule("flow").add_noise(data, noise, [0.0, 0.25, 1.0])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    torch.testing.assert_close(noisy[0], data[0])
    torch.testing.assert_close(noisy[2], noise[2])
    scaled = scheduler.scale_noise(data[1], scheduler.timesteps[750:751], noise[1])
    torch.testing.assert_close(noisy[1], scaled, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target, noise - data)


def test_densities_have_the_published_distribution() -> None:
    uniform = np.linspace(0.0005, 0.9995, 1000)
    logit = np.array([TimeDensity("logit_normal", mean=0.5, std=2.0).share(u) for u in uniform])
    normal = np.log(logit / (1 - logit))
    assert normal.mean() == pytest.approx(0.5, abs=0.01)
    assert normal.std() == pytest.approx(2.0, abs=0.02)
    mode = [TimeDensity("mode", scale=1.29).share(u) for u in uniform]
    expected = 1 - uniform - 1.29 * (np.cos(math.pi / 2 * uniform) ** 2 - 1 + uniform)
    np.testing.assert_allclose(mode, expected)
    assert TimeDensity("uniform").share(0.3) == 0.3
    assert all(0 <= TimeDensity("logit_normal").share(u) <= 1 for u in (0.0, 1.0))


@pytest.mark.parametrize("kind", ["sigma_sqrt", "cosmap"])
def test_weights_of_flow_matching_equal_those_of_diffusers(kind: str) -> None:
    expected = compute_loss_weighting_for_sd3(kind, torch.tensor(SHARES, dtype=torch.float64))
    weights = [NoiseSchedule("flow").weight(kind, share) for share in SHARES]
    np.testing.assert_allclose(weights, expected)


def test_unsupported_prediction_is_refused() -> None:
    scheduler = diffusers.DDPMScheduler(prediction_type="sample")
    with pytest.raises(UserError, match=r"^model\.path: scheduler_config\.json: prediction_type"):
        read(scheduler)
    with pytest.raises(UserError, match=r"^train\.losses: shift"):
        read(diffusers.DDPMScheduler(), shift=2.0)
