"""Learning rates against closed forms."""

import math

import pytest

from omnizoo.config.sections.train import TrainSection
from omnizoo.training.optimizers.schedule import learning_rate


def rates(**train: object) -> list[float]:
    config = TrainSection.model_validate({"steps": 100, "lr": 2.0, "min_lr_ratio": 0.25} | train)
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


def test_warmup_is_linear_from_zero_to_the_peak() -> None:
    for schedule in ("constant", "linear", "cosine", "wsd"):
        assert rates(schedule=schedule, warmup_steps=10)[:10] == pytest.approx([0.2 * i for i in range(1, 11)])


def test_constant_stays_at_the_peak() -> None:
    assert rates(schedule="constant") == [2.0] * 100
    assert rates(schedule="constant", warmup_steps=10)[9:] == [2.0] * 91


def test_linear_ends_at_min_lr_at_the_last_step() -> None:
    expected = [2.0 - 1.5 * i / 90 for i in range(91)]
    assert rates(schedule="linear", warmup_steps=10)[9:] == pytest.approx(expected)


def test_cosine_decays_from_the_peak_to_min_lr() -> None:
    expected = [0.5 + 1.5 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(91)]
    assert rates(schedule="cosine", warmup_steps=10)[9:] == pytest.approx(expected)


@pytest.mark.parametrize(("decay_steps", "tail"), [(0, 20), (30, 30)])
def test_wsd_decays_in_the_last_fifth_by_default(decay_steps: int, tail: int) -> None:
    expected = [2.0] * (100 - 10 - tail) + [2.0 - 1.5 * i / tail for i in range(1, tail + 1)]
    assert rates(schedule="wsd", warmup_steps=10, decay_steps=decay_steps)[10:] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_short_runs_have_positive_rates_up_to_the_peak(schedule: str, steps: int, warmup_steps: int) -> None:
    values = rates(schedule=schedule, steps=steps, warmup_steps=warmup_steps)
    assert all(0 < value <= 2.0 for value in values)


def test_min_lr_of_zero_is_reached_exactly() -> None:
    for schedule in ("linear", "cosine", "wsd"):
        assert rates(schedule=schedule, min_lr_ratio=0.0)[-1] == pytest.approx(0.0, abs=1e-12)
