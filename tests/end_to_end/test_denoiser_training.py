"""Training of diffusion transformers: against plain diffusers, on several layouts, killed and resumed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from denoiser_cases import Batch, call_flux, plain_transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from PIL import Image, ImageOps
from pipelines import TEXT_WIDTH, make_pipeline
from processes import run_on_ranks, start_omnizoo, train_in_this_world
from safetensors.torch import save_file
from tiny import read_steps

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.loading.loader import build_loader
from omnizoo.parallel.process import Process
from omnizoo.training.denoising.noisy_batch import SampleNoise
from omnizoo.training.setup import build_bundle

STEPS = 5
TIMEOUT = 240
LATENT_SHAPES = [(4, 8, 4), (4, 4, 8), (4, 6, 6), (4, 10, 4)]
VALUES = ("loss", "grad_norm", "lr", "tokens", "tokens_seen", "fill", "epoch")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pipeline("flux", tmp_path_factory.mktemp("pipelines") / "flux")


def write_config(folder: Path, pipeline: Path, rows: list[dict[str, str]], **sections: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": [{"path": str(folder / "rows.jsonl")}], "workers": 0}
    train = {"steps": STEPS, "packs_per_step": 4, "lr": 1e-3, "losses": [{"kind": "denoise"}]}
    config = {
        "model": {"path": str(pipeline)},
        "data": data | sections.pop("data", {}),
        "train": train | sections.pop("train", {}),
        "log": {"dir": str(folder / "run")},
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def picture_config(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    rows = []
    for number in range(12):
        width, height = ((40, 24), (20, 30), (33, 31))[number % 3]
        Image.fromarray(random.integers(0, 255, (height, width, 3), np.uint8)).save(folder / f"{number}.png")
        rows.append({"prompt": f"picture number {number}", "image": f"{number}.png"})
    data = {"shapes": ["32x16", "16x32", "24x24"], "pack_tokens": 120, "text_tokens": 12, "text_dropout": 0.3}
    losses = [{"kind": "denoise", "options": {"guidance": 3.5}}]
    return write_config(folder, pipeline, rows, data=data, train={"losses": losses})


@pytest.fixture(scope="module")
def latent_config(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(20):
        shape = LATENT_SHAPES[number % len(LATENT_SHAPES)]
        tensors = {
            "mean": torch.randn(shape, generator=generator),
            "std": torch.rand(shape, generator=generator),
            "text": torch.randn(6, TEXT_WIDTH, generator=generator),
            "pooled": torch.randn(TEXT_WIDTH, generator=generator),
        }
        save_file(tensors, folder / f"{number}.safetensors")
        rows.append({"prompt": f"picture number {number}", "latents": f"{number}.safetensors"})
    return write_config(folder, pipeline, rows, data={"pack_tokens": 48}, checkpoint={"every": 1})


def train(process: Process, config: Path, run: Path, *options: str) -> None:
    assert train_in_this_world([config, "--log.dir", run, *options]) == 0


def values(run: Path, names: tuple[str, ...] = VALUES) -> list[list[float]]:
    steps = read_steps(run)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    return [[row[name] for name in names] for row in steps]


@pytest.fixture(scope="module")
def one_process(latent_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one")
    result = run_on_ranks(train, 1, latent_config, run, timeout=TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    return run


@dataclass(frozen=True)
class PlainFlux:
    """Encodes and noises samples with diffusers alone."""

    pipeline: Any
    text_tokens: int

    def sample(self, row: dict[str, str], folder: Path, shape: tuple[int, int], noise: SampleNoise) -> Batch:
        height, width = shape
        fitted = ImageOps.fit(Image.open(folder / row["image"]), (width, height), Image.Resampling.LANCZOS)
        pixels = self.pipeline.image_processor.preprocess(fitted)
        text, pooled, _ = self.pipeline.encode_prompt(row["prompt"], None, max_sequence_length=self.text_tokens)
        vae = self.pipeline.vae
        posterior = vae.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * noise.normal(posterior.mean.shape[1:])
        data = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        random = noise.normal(data.shape[1:])
        tokens = data.shape[2] * data.shape[3] // 4
        shift = float(np.exp(calculate_shift(tokens)))
        uniform = torch.tensor(noise.uniform, dtype=torch.float64)
        share = float(torch.special.ndtri(uniform).sigmoid())
        share = shift * share / (1 + (shift - 1) * share)
        condition = {"text": text, "pooled": pooled, "guidance": torch.tensor([3.5])}
        noisy = (1 - share) * data + share * random
        return Batch(noisy, torch.tensor([share]), condition, random - data)


def test_shape_with_fewer_tokens_than_ranks_raises(picture_config: Path) -> None:
    config = load_config(picture_config, ["--parallel.ulysses", "512", "--parallel.ring", "2"])
    with pytest.raises(UserError, match=r"^data\.shapes: 32x16 .*1024 ranks"):
        _ = build_bundle(config).media


def test_first_step_equals_plain_diffusers(picture_config: Path, pipeline: Path, tmp_path: Path) -> None:
    result = run_on_ranks(train, 1, picture_config, tmp_path, "--train.steps", "1", timeout=TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    row_of = [json.loads(line) for line in (picture_config.parent / "rows.jsonl").read_text().splitlines()]
    config = load_config(picture_config, [])
    samples = first_samples(config)

    plain = PlainFlux(DiffusionPipeline.from_pretrained(pipeline), text_tokens=12)
    model = plain_transformers(pipeline)["transformer"]
    errors = []
    num_dropped = 0
    with torch.no_grad():
        for sample_id, prompt, latents in samples:
            _, _, number, _ = map(int, sample_id.split("/"))
            row = row_of[number] | {"prompt": prompt}
            num_dropped += prompt == ""
            shape = (4 * latents[1], 4 * latents[2])
            batch = plain.sample(row, picture_config.parent, shape, SampleNoise(0, sample_id))
            errors.append(float((call_flux(model, batch) - batch.target).square().mean()))
    assert 0 < num_dropped < len(errors)
    assert read_steps(tmp_path)[0]["loss"] == pytest.approx(np.mean(errors), rel=1e-6)


def first_samples(config: Config) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the id, prompt and latent shape of each sample of the first step."""
    loaded = build_loader(config, None, 0, 1, **build_bundle(config).media).next_step()
    samples = []
    for pack in loaded.packs:
        for sample_id, item in zip(pack.sample_ids, pack.items, strict=True):
            assert item.inputs is not None
            prompt = bytes(item.inputs["prompt"].tolist()).decode()
            samples.append((sample_id, prompt, tuple(map(int, item.size.shape))))
    return samples


def check_layout(config: Path, reference: Path, run: Path, num_ranks: int, *options: str) -> None:
    result = run_on_ranks(train, num_ranks, config, run, *options, timeout=TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    names = ("loss", "grad_norm")
    np.testing.assert_allclose(values(run, names), values(reference, names), rtol=1e-6)
    assert [row["tokens"] for row in read_steps(run)] == [row["tokens"] for row in read_steps(reference)]


def test_ulysses_equals_one_process(latent_config: Path, one_process: Path, tmp_path: Path) -> None:
    assert len({row["tokens"] for row in read_steps(one_process)}) > 1  # shapes are mixed
    check_layout(latent_config, one_process, tmp_path, 2, "--parallel.ulysses", "2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, ["--parallel.dp_shard", "2"]),
        (2, ["--parallel.ring", "2"]),
        (4, ["--parallel.dp_replicate", "2", "--parallel.dp_shard", "2"]),
        (4, ["--parallel.ulysses", "2", "--parallel.ring", "2", "--parallel.recompute", "full"]),
        (4, ["--parallel.dp_shard", "2", "--parallel.ulysses", "2"]),
    ],
)
def test_layout_equals_one_process(
    num_ranks: int, options: list[str], latent_config: Path, one_process: Path, tmp_path: Path
) -> None:
    check_layout(latent_config, one_process, tmp_path, num_ranks, *options)


def test_killed_run_is_bit_identical_after_resume(latent_config: Path, one_process: Path, tmp_path: Path) -> None:
    running = start_omnizoo(["train", latent_config, "--log.dir", tmp_path])
    checkpoint = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
    assert running.wait_until(checkpoint.exists, TIMEOUT)
    running.kill()
    assert len(read_steps(tmp_path)) < STEPS
    result = run_on_ranks(train, 1, latent_config, tmp_path, timeout=TIMEOUT)
    assert result.code == 0, result.stdout + result.stderr
    assert values(tmp_path) == values(one_process)
