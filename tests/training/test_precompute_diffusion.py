"""`omnizoo data precompute` for diffusion transformers: latents and prompts, kills, and models that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from pipelines import make_pipeline
from processes import run_omnizoo, start_omnizoo
from safetensors.torch import load_file, save_file
from tiny import read_steps

from omnizoo.cli.main import main
from omnizoo.cli.parser import parse
from omnizoo.config.errors import UserError
from omnizoo.data.sources.precomputed import PrecomputedIndex
from omnizoo.models.diffusion.conditioning.latents import LatentEncoder, Normalization, read_normalization
from omnizoo.models.diffusion.conditioning.text import TextConditioner
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder

ROWS = 12
SHARD_ROWS = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that trains a tiny Flux on pictures of three shapes, with dropped prompts."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        width, height = ((40, 24), (20, 30), (33, 31))[number % 3]
        Image.fromarray(random.integers(0, 255, (height, width, 3), np.uint8)).save(folder / f"{number}.png")
        rows.append({"prompt": f"picture number {number}", "image": f"{number}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "model": {"path": str(make_pipeline("flux", folder / "flux"))},
        "data": {
            "sources": [{"path": str(folder / "rows.jsonl")}],
            "workers": 0,
            "shapes": ["32x16", "16x32", "24x24"],
            "pack_tokens": 120,
            "text_tokens": 12,
            "text_dropout": 0.3,
        },
        "train": {"steps": 5, "packs_per_step": 2, "lr": 1e-3, "losses": [{"kind": "denoise"}]},
        "log": {"dir": str(folder / "run")},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(fields))
    return file


def precompute(config: Path, out: Path, *options: str) -> list[str]:
    """Return the command line."""
    return ["data", "precompute", str(config), "--out", str(out), "--shard-rows", str(SHARD_ROWS), *options]


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    out = config.with_name("precomputed")
    assert main(precompute(config, out)) == 0
    return out


def run_main(command: list[str]) -> None:
    """Run a command in this process. Errors are raised instead of printed."""
    args = parse(command)
    args.run(args)


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def train(config: Path, run: Path, *options: str) -> list[list[float]]:
    """Train, and return the loss and the norm of the gradient of each step."""
    run_main(["train", str(config), "--log.dir", str(run), *options])
    return [[step["loss"], step["grad_norm"]] for step in read_steps(run)]


def test_training_with_precomputed_latents_equals_training_on_the_fly(
    config: Path, folder: Path, tmp_path: Path
) -> None:
    on_the_fly = train(config, tmp_path / "on_the_fly")
    precomputed = train(config, tmp_path / "precomputed", "--data.sources", f"[{{path: {folder}}}]")
    assert len(on_the_fly) == 5
    assert precomputed == on_the_fly


def test_shards_contain_posterior_and_conditions(config: Path, folder: Path) -> None:
    pipeline = PipelineFolder.read(config.with_name("flux"))
    latents = load_file(folder / "latents-00000.safetensors")
    text = load_file(folder / "text-00000.safetensors")
    empty = load_file(folder / "empty-text.safetensors")
    cpu = torch.device("cpu")
    conditioner = TextConditioner(pipeline, cpu, max_text_tokens=12)
    for name, tensor in conditioner.encode("picture number 3").items():
        assert torch.equal(text[f"3/{name}"], tensor)
    for name, tensor in conditioner.encode("").items():
        assert torch.equal(empty[f"empty/{name}"], tensor)

    pixels = np.asarray(
        Image.open(config.with_name("2.png")).resize((24, 24), Image.Resampling.LANCZOS, (1, 0, 32, 31))
    )
    values = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1
    posterior = LatentEncoder(pipeline, cpu).encode(values)
    assert posterior.std is not None
    assert latents["2/mean"].shape == posterior.mean.shape

    index = PrecomputedIndex.read(folder)
    assert index.num_rows == ROWS
    assert index.stages == ("latents", "text")
    assert Normalization.from_json(index.normalization or {}) == read_normalization(pipeline)
    assert json.loads(index.file.read_text())["shapes"]["latents"]["mean"] == {"4x4x8": 4, "4x6x6": 4, "4x8x4": 4}


def test_killed_precompute_continues_with_identical_files(config: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = precompute(config, out, "--nproc", "2")
    for file in ("latents-00000.safetensors", "text-00001.safetensors"):
        running = start_omnizoo(command)
        running.wait_until((out / file).exists, timeout=200)
        running.kill()
    result = run_omnizoo(command)
    assert result.code == 0, result.stderr
    assert content(out) == content(folder)


def test_latents_of_another_autoencoder_are_refused(config: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "flux"
    shutil.copytree(config.with_name("flux"), other)
    file = other / "vae/diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file)
    command = ["train", str(config), "--data.sources", f"[{{path: {folder}}}]", "--log.dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match="another `vae`"):
        run_main([*command, "--model.path", str(other)])


def test_latents_that_are_not_finite_are_one_line(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = AutoencoderKL.encode

    def broken(self: Any, pixels: torch.Tensor) -> Any:
        encoded = encode(self, pixels)
        if pixels.shape[-2:] == (24, 24):
            encoded.latent_dist.mean[0, 0, 0] = float("nan")
        return encoded

    monkeypatch.setattr(AutoencoderKL, "encode", broken)
    with pytest.raises(UserError, match=r"rows\.jsonl:3: `mean` of latents"):
        run_main(precompute(config, tmp_path / "error"))
    run_main(precompute(config, tmp_path / "skip", "--data.on_bad_row", "skip"))
    assert PrecomputedIndex.read(tmp_path / "skip").num_rows == 8


def test_random_crops_are_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.crop"):
        run_main(precompute(config, tmp_path / "out", "--data.crop", "random"))
