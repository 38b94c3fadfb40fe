"""Random initialization: the model's rule or its constructor sets each tensor. Otherwise an error is raised."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tiny import SHAPE, write_config
from torch import nn
from torch.nn.init import orthogonal_, trunc_normal_
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.models.build import build_model
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallelize.parallelize import parallelize_model

SMALL = SHAPE | {
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# All kinds of rules: plain, scaled by depth, biases and tables that only constructors set, all rotary embeddings.
FAMILIES = [
    "afmoe",
    "apertus",
    "bitnet",
    "bloom",
    "cohere2",
    "deepseek_v2",
    "diffllama",
    "doge",
    "ernie4_5_moe",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "gptj",
    "granitemoe",
    "hunyuan_v1_moe",
    "jetmoe",
    "lfm2",
    "llama4_text",
    "longcat_flash",
    "modernbert-decoder",
    "mpt",
    "nemotron",
    "opt",
    "phimoe",
    "qwen3_moe",
    "xglm",
]


def on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def construct() -> nn.Module:
        with torch.device("meta"):
            return build()

    return construct


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors.items()}


def check(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """Compare with two transformers models. Values that they share must be equal, others have the same distribution."""
    torch.manual_seed(1)
    first, second = tensors_of(build()), tensors_of(build())
    found = dict(initial_weights(on_meta(build), 0, set(first)))
    assert found.keys() == first.keys()
    for name, expected in first.items():
        value = found[name]
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        if torch.equal(expected, second[name]):
            assert torch.equal(value, expected), name
        else:
            assert value.isfinite().all(), name
            assert not torch.equal(value, expected), name
            if value.numel() >= 128:
                assert value.std() == pytest.approx(float(expected.std()), rel=0.4), name
                assert abs(value.mean() - expected.mean()) < 0.5 * expected.std(), name
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_tensors_match_constructor_and_rules_of_family(family: str) -> None:
    def build() -> nn.Module:
        known = AutoConfig.for_model(family)
        config = AutoConfig.for_model(family, **{k: v for k, v in SMALL.items() if hasattr(known, k)})
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    check(build)


class Own(nn.Module):
    """A typical user module: values set in the constructor, changed children, torch modules."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, width, 3))
        self.old_conv = nn.Conv1d(width, width, 3)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.temperature = nn.Parameter(torch.log(torch.tensor(1 / 0.07)))
        self.class_token = nn.Parameter(torch.randn(1, width) * 0.02)
        table = torch.randn(8, width)  # two halves of one draw
        self.upper, self.lower = nn.Parameter(table[:4].clone()), nn.Parameter(table[4:].clone())
        self.whole = nn.Parameter(table)
        self.patches = nn.Parameter(torch.empty(16, width))
        trunc_normal_(self.patches, std=0.02, a=-0.04, b=0.04)
        self.turn = nn.Parameter(torch.empty(width, width))
        orthogonal_(self.turn)
        self.partly = nn.Parameter(torch.empty(4, width))
        with torch.no_grad():
            self.partly[0].fill_(1)
            self.partly[1:].normal_(std=3.0)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("frequencies", 10000 ** -(torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("order", torch.arange(8).flip(0))
        self.register_buffer("waves", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mean", torch.tensor([0.48, 0.46, 0.41]).view(3, 1))


def test_user_module_starts_as_its_constructor_leaves_it() -> None:
    found = check(Own)
    assert not found["attention.out_proj.bias"].any()  # set by the attention, not by its linear layer
    assert torch.equal(torch.cat([found["upper"], found["lower"]]), found["whole"])
    assert found["patches"].abs().max() <= 0.04
    torch.testing.assert_close(found["turn"] @ found["turn"].T, torch.eye(32), atol=1e-5, rtol=0)
    direction = found["conv.parametrizations.weight.original1"]
    length = found["conv.parametrizations.weight.original0"]
    torch.testing.assert_close(length, direction.norm(dim=(1, 2), keepdim=True))


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.empty(4, 4))
        with torch.no_grad():
            self.table[0].zero_()


class ForgottenIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.empty(4, dtype=torch.int64))


@pytest.mark.parametrize(("module", "name"), [(Forgotten, "table"), (ForgottenIndex, "index")])
def test_uninitialized_tensor_raises_with_its_name(module: type[nn.Module], name: str) -> None:
    with pytest.raises(UserError, match=f"^model: 0.{name} .*{module.__name__}") as error:
        dict(initial_weights(on_meta(lambda: nn.Sequential(module())), 0, {f"0.{name}"}))
    assert "\n" not in str(error.value)


def test_fp64_constant_of_constructor_is_not_rounded_to_fp32() -> None:
    """transformers builds with the run's dtype as the default, which differs when the tensor is computed later."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.ones(3).mul_(5))

    def construct() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                return Own()
        finally:
            torch.set_default_dtype(torch.float32)

    ((_, scale),) = initial_weights(construct, 0, {"scale"})
    assert scale.dtype == torch.float64
    assert scale.tolist() == [5.0] * 3


def test_tensor_is_initialized_without_rest_of_model() -> None:
    """Compute one small tensor of a model that has terabytes on meta."""

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(2**19, 2**19) for _ in range(4)), nn.LayerNorm(8))
        nn.init.ones_(layers[2].bias)
        return layers

    found = dict(initial_weights(on_meta(build), 0, {"2.bias", "4.weight"}))
    assert found["2.bias"].eq(1).all()
    assert found["4.weight"].eq(1).all()


def hash_weights(process: Process, path: Path, out: Path) -> None:
    config = load_config(path, [])
    mesh = build_mesh(config, process)
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, mesh, config)
    hashes = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert whole.isfinite().all(), name
        hashes[name] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    (out / f"{mesh.layout.world}.{process.rank}.json").write_text(json.dumps(hashes))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ernie4_5_moe", "apertus"])
def test_initial_weights_ignore_rank_and_layout(family: str, tmp_path: Path) -> None:
    known: Any = AutoConfig.for_model(family)
    fields = {k: v for k, v in SMALL.items() if hasattr(known, k)} | {"vocab_size": 512, "model_type": family}
    path = write_config(tmp_path, model={"config": fields})
    for ranks in (1, 2):
        result = run_on_ranks(hash_weights, ranks, path, tmp_path)
        assert result.code == 0, result.stderr
    first, *others = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1.0", "2.0", "2.1")]
    assert all(other == first for other in others)
