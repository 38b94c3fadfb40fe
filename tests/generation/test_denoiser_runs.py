"""Runs of diffusion transformers: samples during training, exports, LoRA files and `omnizoo generate`."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from pipelines import make_pipeline
from safetensors.torch import load_file

import omnizoo
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.reporting.run_folder import read_rows

ARGUMENTS = {"height": 16, "width": 24, "num_inference_steps": 2, "max_sequence_length": 12}


def make_rows(folder: Path) -> None:
    random = np.random.default_rng(0)
    rows = []
    for i in range(4):
        Image.fromarray(random.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        rows.append({"prompt": f"picture {i}", "image": f"{i}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, **sections: Any) -> Path:
    """Train two steps with an evaluation after each, and return the run folder."""
    run = folder / sections.pop("run")
    config = {
        "model": {"path": str(folder / "flux")} | sections.pop("model", {}),
        "data": {
            "sources": [{"path": str(folder / "rows.jsonl")}],
            "eval_sources": [{"path": str(folder / "rows.jsonl")}],
            "shapes": ["16x24"],
            "text_tokens": 12,
            "pack_tokens": 64,
            "workers": 0,
        },
        "train": {"steps": 2, "packs_per_step": 1, "lr": 1e-2, "losses": [{"kind": "denoise"}]},
        "evaluation": {"every": 1, "samples": 2, "packs": 1, "pipeline": {"num_inference_steps": 2}},
        "log": {"dir": str(run)},
        **sections,
    }
    path = folder / f"{run.name}.yaml"
    path.write_text(json.dumps(config))
    assert main(["train", str(path)]) == 0
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of all weights and a run of an adapter."""
    folder = tmp_path_factory.mktemp("runs")
    make_pipeline("flux", folder / "flux")
    make_rows(folder)
    train(folder, run="full", optimizer={"ema": {"decay": 0.5}})
    train(folder, run="adapter", model={"adapter": {"rank": 2, "alpha": 6}})
    return folder


def drawn(pipeline: Any, prompt: str, seed: int) -> Image.Image:
    """Return the image that plain diffusers draws."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(prompt, **ARGUMENTS, generator=torch.Generator().manual_seed(seed)).images[0]


def test_samples_of_the_last_evaluation_equal_those_of_the_export(runs: Path, tmp_path: Path) -> None:
    records = read_rows(runs / "full" / "samples.jsonl")
    assert [(record["step"], record["question"]) for record in records] == [
        (step, f"picture {i}") for step in (1, 2) for i in range(2)
    ]
    omnizoo.export(runs / "full", tmp_path / "out")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    for i, record in enumerate(records[2:]):
        [item] = record["items"]
        image = Image.open(runs / "full" / item["file"])
        assert np.array_equal(np.asarray(image), np.asarray(drawn(pipeline, record["question"], seed=i)))
        [expected] = record["expected_items"]
        assert (runs / "full" / expected["file"]).read_bytes() == (runs / f"{i}.png").read_bytes()
        assert item["file"] in (runs / "full" / "report.html").read_text()
    assert records[0]["items"] != records[2]["items"]


def test_generate_from_run_equals_generate_from_export(runs: Path, tmp_path: Path) -> None:
    omnizoo.export(runs / "full", tmp_path / "out")
    for model, name in ((runs / "full", "run"), (tmp_path / "out", "export")):
        responses = omnizoo.generate(model, ["picture 1"], pipeline=ARGUMENTS, seed=7, out=tmp_path / name)
        assert [response.files for response in responses] == [[tmp_path / name / "0.png"]]
    images = [np.asarray(Image.open(tmp_path / name / "0.png")) for name in ("run", "export")]
    assert np.array_equal(*images)
    plain = drawn(diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out"), "picture 1", seed=7)
    assert np.array_equal(images[0], np.asarray(plain))


def test_moving_average_is_exported(runs: Path, tmp_path: Path) -> None:
    weights = []
    for name in ("last", "ema"):
        omnizoo.export(runs / "full", tmp_path / name, ema=name == "ema")
        weights.append(load_file(tmp_path / name / "transformer" / "diffusion_pytorch_model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_adapter_of_a_run_in_diffusers_draws_as_the_merged_export(runs: Path, tmp_path: Path) -> None:
    omnizoo.export(runs / "adapter", tmp_path / "lora")
    omnizoo.export(runs / "adapter", tmp_path / "merged", merge=True)
    adapted = diffusers.DiffusionPipeline.from_pretrained(runs / "flux")
    before = np.asarray(drawn(adapted, "picture 0", seed=0), np.int64)
    adapted.load_lora_weights(tmp_path / "lora")
    after = np.asarray(drawn(adapted, "picture 0", seed=0), np.int64)
    merged = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "merged")
    assert np.abs(after - np.asarray(drawn(merged, "picture 0", seed=0), np.int64)).max() <= 1
    assert np.abs(after - before).max() > 1
    [response] = omnizoo.generate(
        tmp_path / "lora", "picture 0", base=str(runs / "flux"), pipeline=ARGUMENTS, out=tmp_path / "media"
    )
    assert np.array_equal(np.asarray(Image.open(response.files[0])), after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline": {"steps": 2}}, "--pipeline: FluxPipeline has no argument 'steps'"),
        ({"temperature": 0.5}, "--temperature: a pipeline"),
        ({"pipeline": ARGUMENTS | {"max_sequence_length": 1000}}, "FluxPipeline: .*max_sequence_length"),
    ],
)
def test_generate_with_an_unusable_setting_raises(
    arguments: dict[str, Any], message: str, runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        omnizoo.generate(runs / "flux", "picture", out=tmp_path / "media", **arguments)
    assert not (tmp_path / "media").exists()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"evaluation": {"samples": 2, "every": 1, "pipeline": {"steps": 2}}}, "evaluation.pipeline: FluxPipeline"),
        ({"evaluation": {"samples": 2, "every": 1, "temperature": 0.5}}, "evaluation.temperature"),
        ({"evaluation": {"samples": 2, "every": 1, "metrics": ["exact_match"]}}, "evaluation.metrics.0"),
        ({"checkpoint": {"export": {"every": 1}}}, "checkpoint.export"),
    ],
)
def test_run_with_an_unusable_setting_raises(
    section: dict[str, Any], key: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((runs / "full.yaml").read_text()) | section | {"log": {"dir": str(tmp_path / "run")}}
    (tmp_path / "wrong.yaml").write_text(json.dumps(config))
    assert main(["train", str(tmp_path / "wrong.yaml")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert key in error
