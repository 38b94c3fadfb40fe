"""Each family of diffusion transformers against plain diffusers in one process: alone, and on four ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser_cases import CASES, DenoiserCase, make_folder, plain_transformers, reference_loss
from processes import run_on_ranks
from torch import nn

from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.build import build_model
from omnizoo.models.diffusion.predict import predict
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.parallel.fsdp.sharded_tensors import full_tensor
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence.sequence_parallel import SequenceParallel
from omnizoo.parallelize.parallelize import parallelize_model

SIZES = {"dp": "dp_shard", "rep": "dp_replicate", "uly": "ulysses", "ring": "ring"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    for case in CASES.values():
        make_folder(case.pipeline, folder / case.pipeline)
    return folder


def config_of(folder: Path, layout: str, **train: Any) -> Config:
    parallel: dict[str, Any] = {"recompute": "none"}
    for axis in layout.split("."):
        name = axis.rstrip("0123456789")
        parallel[SIZES[name]] = int(axis.removeprefix(name))
    sections = {"model": {"path": str(folder)}, "parallel": parallel, "train": {"packs_per_step": 4, **train}}
    return load_config(sections, needs_data=False)


def largest_error(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the norm of the difference, relative to the norm of the tensor or, if that is tiny, of all tensors."""
    return float((actual - expected).norm() / max(float(expected.norm()), 1e-4 * scale))


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by name. Collective for a sharded model."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = full_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return gradients


def compare(
    actual: dict[str, torch.Tensor], loss: float, plain: dict[str, nn.Module], expected: float
) -> dict[str, Any]:
    """Return the relative error of the loss, and the largest one of the gradients with its name."""
    prefixes = {name: f"{name}." if len(plain) > 1 else "" for name in plain}
    gradients = {}
    for name, transformer in plain.items():
        for key, parameter in transformer.named_parameters():
            gradients[prefixes[name] + key] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    scale = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    assert gradients.keys() == actual.keys()
    errors = {key: largest_error(actual[key], gradient, scale) for key, gradient in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    return {"loss": abs(loss - expected) / expected, "gradient": errors[worst], "worst": worst}


def run_reference(folder: Path, case: DenoiserCase) -> tuple[dict[str, nn.Module], float]:
    plain = plain_transformers(folder)
    loss = reference_loss(plain, case, case.batch())
    loss.backward()
    return plain, loss.item()


def run_layout(
    process: Process, folder: Path, case: DenoiserCase, layout: str
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients and the loss of one layout."""
    config = config_of(folder, layout)
    mesh = build_mesh(config, process)
    model = build_model(config.model, "fp32")
    parallelize_model(model, mesh, config)
    recipe = denoiser_recipe(model)
    assert recipe is not None

    batch = case.batch()
    num_samples = len(batch.noisy) // mesh.layout.dp
    part = batch.part(slice(mesh.dp_rank * num_samples, (mesh.dp_rank + 1) * num_samples))

    def new_exchange(lengths: Any) -> SequenceParallel:
        return SequenceParallel(mesh, lengths, overlap=False)

    sequence = new_exchange if mesh.layout.sp > 1 else None
    prediction = predict(model, recipe, part.noisy, part.share, part.condition, sequence)
    loss = (prediction - part.target).square().mean() / mesh.layout.world
    loss.backward()
    return full_gradients(model), mesh.sum([loss.item()])[0]


def check_layouts(process: Process, folder: Path, names: list[str], layouts: list[str]) -> None:
    results = {}
    for name in names:
        case = CASES[name]
        plain, expected = run_reference(folder / case.pipeline, case) if process.rank == 0 else ({}, 0.0)
        for layout in layouts or case.layouts:
            gradients, loss = run_layout(process, folder / case.pipeline, case, layout)
            if process.rank == 0:
                results[f"{name} {layout}"] = compare(gradients, loss, plain, expected)
    if process.rank == 0:
        (folder / f"{process.world_size}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def on_four_ranks(folders: Path) -> dict[str, dict[str, Any]]:
    result = run_on_ranks(check_layouts, 4, folders, list(CASES), [])
    assert result.code == 0, result.stdout + result.stderr
    loaded: dict[str, dict[str, Any]] = json.loads((folders / "4.json").read_text())
    return loaded


def assert_close(result: dict[str, Any]) -> None:
    assert result["loss"] < 1e-6, result
    assert result["gradient"] < 1e-5, result


@pytest.mark.parametrize("name", CASES)
def test_prediction_and_gradients_equal_those_of_the_pipelines_call(name: str, folders: Path) -> None:
    case = CASES[name]
    folder = folders / case.pipeline
    plain, expected = run_reference(folder, case)
    model = build_model(ModelSection(path=str(folder)), "fp32", "cpu")
    recipe = denoiser_recipe(model)
    assert recipe is not None
    weights = {name: transformer.state_dict() for name, transformer in plain.items()}
    for component, state in weights.items():
        (model.get_submodule(component) if len(weights) > 1 else model).load_state_dict(state)
    batch = case.batch()
    prediction = predict(model, recipe, batch.noisy, batch.share, batch.condition)
    loss = (prediction - batch.target).square().mean()
    loss.backward()
    assert_close(compare(full_gradients(model), loss.item(), plain, expected))


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, case in CASES.items() for layout in case.layouts]
)
def test_layouts_of_four_ranks_agree_with_plain_diffusers(
    name: str, layout: str, on_four_ranks: dict[str, dict[str, Any]]
) -> None:
    assert_close(on_four_ranks[f"{name} {layout}"])


def test_three_ranks_share_four_heads(folders: Path) -> None:
    names = ["wan", "flux"]
    result = run_on_ranks(check_layouts, 3, folders, names, ["uly3"])
    assert result.code == 0, result.stdout + result.stderr
    for values in json.loads((folders / "3.json").read_text()).values():
        assert_close(values)
