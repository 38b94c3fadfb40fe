"""Exports and LoRA files of diffusion transformers, read by plain diffusers, against the trained module itself."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from pipelines import make_pipeline
from safetensors.torch import load_file

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import AdapterSettings
from omnizoo.generation.diffusion.pipeline import check_arguments, load_pipeline, sample
from omnizoo.models.adapters.lora import attach, attached
from omnizoo.models.diffusion.lora_file import write_lora_file
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.models.diffusion.write_pipeline import write_pipeline

CPU = torch.device("cpu")
PROMPT = {"prompt": "a red cat"}
IMAGE = {"height": 32, "width": 32, "num_inference_steps": 2}
CLIP = IMAGE | {"num_frames": 5}
SHORT = {"max_sequence_length": 16}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "flux": IMAGE | SHORT,
    "wan": CLIP | SHORT,
    "wan_two_experts": CLIP | SHORT,
}


def trained(folder: PipelineFolder, name: str = "transformer") -> Any:
    """Return a transformer of the folder, changed as if by training."""
    component = folder.component(name)
    model = component.load_class().from_pretrained(component.folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def drawn(pipeline: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Return the samples of plain diffusers for the prompt."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    output = pipeline(**PROMPT, **arguments, generator=generator, output_type="np", return_dict=False)
    return torch.as_tensor(output[0])


@pytest.mark.parametrize("name", ["flux", "wan_two_experts"])
def test_exported_pipeline_in_diffusers_draws_as_the_trained_module(name: str, tmp_path: Path) -> None:
    folder = PipelineFolder.read(make_pipeline(name, tmp_path / "base"))
    models = {component: trained(folder, component) for component in folder.denoisers}
    write_pipeline(tmp_path / "out", folder, {key: model.state_dict() for key, model in models.items()})

    exported = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    in_place = diffusers.DiffusionPipeline.from_pretrained(folder.path)
    in_place.register_modules(**models)
    expected = drawn(in_place, ARGUMENTS[name])
    torch.testing.assert_close(drawn(exported, ARGUMENTS[name]), expected, rtol=0, atol=0)

    ours = sample(load_pipeline(folder, models, CPU), PROMPT, ARGUMENTS[name], seed=3)
    torch.testing.assert_close(torch.as_tensor(next(iter(ours.values()))), expected, rtol=0, atol=0)


def test_exported_weights_have_the_published_or_requested_precision(tmp_path: Path) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(make_pipeline("wan", tmp_path / "fp32"))
    kept = set(type(pipeline.transformer)._keep_in_fp32_modules)
    pipeline.transformer.to(torch.bfloat16)
    pipeline.transformer.condition_embedder.time_embedder.to(torch.float32)
    pipeline.save_pretrained(tmp_path / "base")
    folder = PipelineFolder.read(tmp_path / "base")
    published = load_file(tmp_path / "base/transformer/diffusion_pytorch_model.safetensors")
    state = {name: tensor.float() for name, tensor in published.items()}

    write_pipeline(tmp_path / "as_published", folder, {"transformer": state})
    written = load_file(tmp_path / "as_published/transformer/diffusion_pytorch_model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {k: v.dtype for k, v in published.items()}

    write_pipeline(tmp_path / "fp16", folder, {"transformer": state}, torch.float16)
    for name, tensor in load_file(tmp_path / "fp16/transformer/diffusion_pytorch_model.safetensors").items():
        assert tensor.dtype == (torch.float32 if kept & set(name.split(".")) else torch.float16), name


def test_incomplete_weights_raise(tmp_path: Path) -> None:
    folder = PipelineFolder.read(make_pipeline("flux", tmp_path / "base"))
    state = trained(folder).state_dict()
    del state["proj_out.bias"]
    with pytest.raises(UserError, match=r"transformer: .*proj_out\.bias"):
        write_pipeline(tmp_path / "out", folder, {"transformer": state})


def test_unknown_pipeline_argument_raises(tmp_path: Path) -> None:
    folder = PipelineFolder.read(make_pipeline("flux", tmp_path / "base"))
    check_arguments(folder, {"guidance_scale": 1.0, "num_inference_steps": 2}, "--pipeline")
    for name in ("num_steps", "generator"):
        with pytest.raises(UserError, match=f"--pipeline: FluxPipeline .*{name}"):
            check_arguments(folder, {name: 2}, "--pipeline")


@pytest.mark.parametrize(("name", "kind"), [("flux", "lora"), ("wan", "rslora"), ("wan", "dora")])
def test_lora_file_in_diffusers_draws_as_the_adapted_module(name: str, kind: Any, tmp_path: Path) -> None:
    folder = PipelineFolder.read(make_pipeline(name, tmp_path / "base"))
    component = folder.component("transformer")
    adapted = component.load_class().from_pretrained(component.folder)
    settings = AdapterSettings(kind=kind, rank=2, alpha=5, init="random")
    attach(adapted, settings, torch.float32, torch.float32)
    torch.manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.rand_like(parameter))
    adapter = attached(adapted)
    assert adapter is not None
    write_lora_file(tmp_path, adapter, dict(adapted.named_parameters()), "hash")

    plain = diffusers.DiffusionPipeline.from_pretrained(folder.path)
    before = drawn(plain, ARGUMENTS[name])
    plain.load_lora_weights(tmp_path)
    [config] = plain.transformer.peft_config.values()
    assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (2, 5, kind == "rslora", kind == "dora")
    after = drawn(plain, ARGUMENTS[name])
    with torch.no_grad():
        expected = sample(load_pipeline(folder, {"transformer": adapted}, CPU), PROMPT, ARGUMENTS[name], seed=3)
    torch.testing.assert_close(after, torch.as_tensor(next(iter(expected.values()))), rtol=0, atol=2e-6)
    assert (after - before).abs().max() > 1e-2
