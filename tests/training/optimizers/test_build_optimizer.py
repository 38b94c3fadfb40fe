"""The optimizer: which parameters decay, and that it is torch's AdamW, sharded or not."""

from pathlib import Path

import pytest
import torch
from tiny import model_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.sections.optimizer import OptimizerSection
from omnizoo.models.build import build_model
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.optimizers.build import build_optimizer


def plain_model(family: str, **changes: object) -> PreTrainedModel:
    fields = model_config(family) | changes
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def config_with(optimizer: OptimizerSection) -> Config:
    data = DataSection(sources=[SourceSettings(path="rows.jsonl")])
    return Config(model=ModelSection(config={"model_type": "llama"}), data=data, optimizer=optimizer)


def decayed(model: PreTrainedModel, optimizer: OptimizerSection) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, config_with(optimizer)).param_groups
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(names)  # each once
    assert {group["weight_decay"] for group in groups} <= {optimizer.weight_decay, 0.0}
    return {names[p] for group in groups if group["weight_decay"] for p in group["params"]}


def matrices(model: PreTrainedModel) -> set[str]:
    """By name alone: the projections of attention and MLP, and a head of its own."""
    return {n for n, _ in model.named_parameters() if n.endswith("_proj.weight") or n == "lm_head.weight"}


def test_norms_biases_and_embeddings_have_no_weight_decay() -> None:
    model = plain_model("llama", attention_bias=True, mlp_bias=True)
    assert decayed(model, OptimizerSection()) == matrices(model)
    assert "lm_head.weight" in matrices(model)


def test_tied_head_counts_as_embedding() -> None:
    model = plain_model("qwen3")
    assert decayed(model, OptimizerSection()) == matrices(model)
    assert not [name for name in matrices(model) if "lm_head" in name]


@pytest.mark.parametrize(
    ("no_decay", "extra"),
    [
        (["norm", "bias"], ["embed_tokens"]),
        (["norm", "embedding"], [".bias"]),
        (["bias", "embedding"], ["norm"]),
        ([], ["embed_tokens", ".bias", "norm"]),
    ],
)
def test_no_decay_kinds_are_configurable(no_decay: list[str], extra: list[str]) -> None:
    model = plain_model("llama", attention_bias=True)
    spared_no_more = {name for name, _ in model.named_parameters() if any(part in name for part in extra)}
    assert decayed(model, OptimizerSection(no_decay=no_decay)) == matrices(model) | spared_no_more


def test_frozen_parameters_are_not_optimized() -> None:
    model = plain_model("llama")
    model.get_input_embeddings().requires_grad_(False)
    groups = build_optimizer(model, config_with(OptimizerSection())).param_groups
    assert model.get_input_embeddings().weight not in {p for group in groups for p in group["params"]}


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-6), ("fp64", 1e-13)])
def test_steps_match_torch_adamw_on_unsharded_copy(precision: str, within: float, tmp_path: Path) -> None:
    options = {"options": {"betas": [0.8, 0.9], "eps": 1e-6}, "weight_decay": 0.3}
    path = write_config(tmp_path, train={"lr": 1e-2, "precision": precision}, optimizer=options)
    config = load_config(path, [])
    with process_group() as process:
        model = build_model(config.model, config.train.precision)
        parallelize_model(model, build_mesh(config, process), config)
        optimizer = build_optimizer(model, config)
        copies = {name: p.full_tensor().detach().clone().requires_grad_() for name, p in model.named_parameters()}
        reference = torch.optim.AdamW(
            [
                {"params": [p for n, p in copies.items() if n in matrices(model)]},
                {"params": [p for n, p in copies.items() if n not in matrices(model)], "weight_decay": 0.0},
            ],
            lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False, fused=False,
        )  # fmt: skip
        torch.manual_seed(0)
        for _ in range(5):
            for name, parameter in model.named_parameters():
                gradient = torch.randn_like(copies[name])
                copies[name].grad = gradient
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad.to_local().copy_(gradient)
            optimizer.step()
            reference.step()
        for name, parameter in model.named_parameters():
            error = (parameter.full_tensor() - copies[name]).norm() / copies[name].norm()
            assert error <= within, name
