"""Adapters: what PEFT computes, on every layout; files that PEFT reads; exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import model_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.schema import Adapter, Model
from omnizoo.models.adapter import attached, set_magnitudes
from omnizoo.models.adapter_files import INITS, adapter_settings, read_factors, write_folder
from omnizoo.models.build import build_model
from omnizoo.models.experts import use_dispatched
from omnizoo.training.forward import packed_inputs

MOE: dict[str, Any] = model_config("qwen3") | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
PACKED = {"position_ids": torch.arange(24)[None]} | packed_inputs(torch.tensor([0, 24], dtype=torch.int32), 24)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def ours(fields: dict[str, Any], **settings: Any) -> nn.Module:
    """A model with random weights and an adapter none of whose factors is zero, in one process."""
    torch.manual_seed(0)
    adapter = Adapter(**({"rank": 4, "alpha": 6.0, "init": "random"} | settings))
    model = build_model(Model(config=fields, adapter=adapter), "fp32", "cpu")
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    set_magnitudes(model, attached(model))
    if "experts" in str([name for name, _ in model.named_modules()]):
        use_dispatched(model)
    return model


def theirs(model: nn.Module, fields: dict[str, Any]) -> nn.Module:
    """The same by PEFT: its own injection, with weights of the base and of the factors copied."""
    found = attached(model)
    settings = found.settings
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="eager")
    state = model.state_dict()
    base.load_state_dict({name: tensor for name, tensor in state.items() if name not in found.started}, strict=False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_dora=settings.kind == "dora",
        use_rslora=settings.kind == "rslora",
        target_modules=list(found.modules),
        target_parameters=list(found.experts) or None,
        modules_to_save=list(found.saved) or None,
        init_lora_weights=INITS[settings.init],
    )
    return get_peft_model(base, config)


CASES = {
    "lora": ("qwen3", {}),
    "rslora": ("qwen3", {"kind": "rslora"}),
    "dora": ("qwen3", {"kind": "dora"}),
    "biases": ("gpt_oss", {"kind": "dora"}),
    "embedding and head": ("llama", {"targets": ["all-linear", "embed_tokens", "lm_head"]}),
    "whole modules": ("llama", {"targets": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]}),
    "experts": (MOE, {"targets": ["q_proj", *EXPERTS]}),
    "one matrix of the experts": (MOE, {"targets": ["experts.down_proj"]}),
    "experts with biases, the other way round": ("gpt_oss", {"targets": EXPERTS}),
}


def name_in_file(name: str) -> str:
    """What PEFT saves one of its own parameters as."""
    name = name.replace(".modules_to_save", "").replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_files_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    fields = model_config(family) if isinstance(family, str) else family
    model = ours(fields, **settings)
    found = attached(model)
    trained = {name: model.get_parameter(name) for name in found.trained}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == found.trained
    write_folder(tmp_path, found, {name: p.detach() for name, p in trained.items()}, None, "")
    again = replace(found, settings=adapter_settings(Adapter(path=str(tmp_path))))
    assert all(torch.equal(value, trained[name]) for name, value in read_factors(again))

    other = theirs(model, fields)
    loaded = other.load_adapter(tmp_path, "default", is_trainable=True)
    assert not loaded.unexpected_keys
    ids = torch.randint(0, 512, (1, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for each in (model.eval(), other.eval()):
        logits = each(input_ids=ids, **(PACKED if each is model else {})).logits
        losses.append(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    expected = {name_in_file(name): p.grad for name, p in other.named_parameters() if p.requires_grad}
    (tmp_path / "gradients").mkdir()
    write_folder(tmp_path / "gradients", found, {name: p.grad for name, p in trained.items()}, None, "")
    gradients = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert set(gradients) == set(expected)
    for name, grad in gradients.items():
        assert grad.norm() > 0, name
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
