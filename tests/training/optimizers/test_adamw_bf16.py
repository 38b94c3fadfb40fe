"""AdamW with moments in bf16: unbiased, the same bits on every layout and over a restart, half the state."""

from pathlib import Path

import pytest
import torch
from optimizer_cases import config_of, walk
from processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny import read_steps

from omnizoo.cli.main import main
from omnizoo.config.load import load_config
from omnizoo.models.build import build_model
from omnizoo.ops.stochastic_rounding import round_to_bf16
from omnizoo.parallel.process import Process, process_group
from omnizoo.parallelize.memory import held_bytes
from omnizoo.training.optimizers.adamw_bf16 import AdamWBf16

LAYOUTS = {"dp2": [], "ep2": ["--parallel.ep=2"]}


def places(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows, dtype=torch.int32), torch.arange(columns, dtype=torch.int32)


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-20, 7.7e30, 0.5])
def test_rounding_is_to_a_neighbor_and_unbiased(value: float) -> None:
    at = places(512, 512)
    values = torch.full((512, 512), value)
    found = sorted(round_to_bf16(values, *at, 1).unique().double().tolist())
    low, high = found[0], found[-1]
    assert len(found) <= 2
    exact = float(torch.tensor(value).double())
    assert low <= exact <= high
    assert (high - low) <= abs(exact) * 2**-7
    chance = 0.0 if high == low else (exact - low) / (high - low)
    for key in (1, 2, 3):
        ups = round_to_bf16(values, *at, key).double() > low if high > low else torch.zeros(1)
        deviation = (chance * (1 - chance) / ups.numel()) ** 0.5
        assert abs(ups.double().mean() - chance) <= 5 * deviation
        if high > low:  # neither along rows nor along columns
            assert (ups.double().mean(0) - chance).abs().max() < 0.2
            assert (ups.double().mean(1) - chance).abs().max() < 0.2


def test_rounding_noise_depends_on_key_and_position() -> None:
    values = torch.full((64, 64), 1.002)
    whole = round_to_bf16(values, *places(64, 64), 5)
    assert not torch.equal(whole, round_to_bf16(values, *places(64, 64), 6))
    rows, columns = places(64, 64)
    assert torch.equal(whole[10:20, 7:], round_to_bf16(values[10:20, 7:], rows[10:20], columns[7:], 5))


def test_moments_change_despite_bf16() -> None:
    """With a constant gradient the second moment goes to its square, by steps smaller than bf16 can tell."""
    p = torch.nn.Parameter(torch.zeros(32, 32))
    optimizer = AdamWBf16([p], lr=0.0, betas=(0.9, 0.999))
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(600):
        p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        nearest = (nearest.float() * 0.999 + 0.004).bfloat16()
    expected = 4 * (1 - 0.999**600)
    state = optimizer.state[p]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.bfloat16
    assert float(state["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=1e-2)
    assert float(nearest) < 0.6 * expected


def test_bf16_weights_are_rounded_stochastically() -> None:
    p = torch.nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
    optimizer = AdamWBf16([p], lr=1e-4, weight_decay=0.0)
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(p.detach().double().mean()) == pytest.approx(1 - 20e-4, abs=2e-4)  # to the nearest it would still be 1


def walk_both(process: Process, folder: Path) -> None:
    for layout, axes in LAYOUTS.items():
        _, after = walk(load_config(folder / "tiny.yaml", axes), process)
        if process.rank == 0:
            save_file(after, folder / f"{layout}.safetensors")


def test_layouts_round_equally_and_steps_are_close_to_fp32(tmp_path: Path) -> None:
    path = config_of(tmp_path, optimizer={"moments": "bf16"})
    result = run_on_ranks(walk_both, 2, tmp_path)
    assert result.code == 0, result.stdout + result.stderr
    with process_group() as process:
        before, one = walk(load_config(path, []), process)
        _, exact = walk(load_config(path, ["--optimizer.moments=fp32"]), process)
    for layout in LAYOUTS:
        for name, weight in load_file(tmp_path / f"{layout}.safetensors").items():
            assert torch.equal(weight, one[name]), (layout, name)
    for name, weight in exact.items():
        assert (one[name] - weight).norm() <= 1e-2 * (weight - before[name]).norm(), name


def test_resumed_run_is_bit_exact(tmp_path: Path) -> None:
    path = config_of(tmp_path, optimizer={"moments": "bf16"}, train={"schedule": "constant"}, checkpoint={"every": 2})
    for name, ends in (("whole", [4]), ("in two", [2, 4])):
        for end in ends:
            assert main(["train", str(path), "--log.dir", str(tmp_path / name), "--train.steps", str(end)]) == 0
    whole, parts = ([(row["loss"], row["grad_norm"]) for row in read_steps(tmp_path / n)] for n in ("whole", "in two"))
    assert len(whole) == 4
    assert whole == parts


def test_bf16_moments_need_half_the_memory(tmp_path: Path) -> None:
    path = config_of(tmp_path)
    config = load_config(path, [])
    model = build_model(config.model, "fp32")
    weights = sum(p.nbytes for p in model.parameters())
    assert held_bytes(model, config) == 4 * weights
    assert held_bytes(model, load_config(path, ["--optimizer.moments=bf16"])) == 3 * weights


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["--optimizer.kind=adafactor"], "optimizer.moments: bf16"),
        (["--optimizer.options", "{amsgrad: true}"], "optimizer.options.amsgrad: not supported with"),
    ],
)
def test_invalid_settings_with_bf16_moments_print_one_line(
    settings: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_of(tmp_path, optimizer={"moments": "bf16"})
    assert main(["train", str(path), *settings]) != 0
    assert said in capsys.readouterr().err
