"""Building models on meta, random initialization, and packed attention compared with a plain masked softmax."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, model_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.build import build_model
from omnizoo.models.recipe import read_facts
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.ops.attention.packed import Boundaries, Pattern, packed_attention, per_sample
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model


def build(family: str, precision: str = "fp32", **changes: Any) -> PreTrainedModel:
    return build_model(ModelSection(config=model_config(family) | changes), precision)


def plain(family: str) -> PreTrainedModel:
    fields = model_config(family)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def everything(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_is_transformers_class_on_meta_in_master_dtype(family: str) -> None:
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}.items():
        model = build(family, precision)
        assert type(model) is type(plain(family))
        assert all(parameter.is_meta and parameter.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "minimax"}, r"`minimax` has linear_attention layers"),
        ({"model_type": "mamba"}, r"attention interface|sample boundaries"),
        ({"model_type": "bloom"}, r"BloomForCausalLM does not use transformers' attention interface"),
        ({"model_type": "clip"}, r"no causal language model of type `clip`"),
        ({"model_type": "qwen33"}, r"model\.config\.model_type: .*qwen33"),
    ],
)
def test_model_that_mixes_samples_raises(config: dict[str, Any], message: str) -> None:
    small = {"num_hidden_layers": 4, "hidden_size": 32, "vocab_size": 64}
    with pytest.raises(UserError, match=message) as error:
        build_model(ModelSection(config=small | config), "fp32")
    assert "\n" not in str(error.value)


def test_missing_folder_and_unknown_attention_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.path: "):
        build_model(ModelSection(path=str(tmp_path)), "fp32")
    with pytest.raises(UserError, match=r"^model\.attention: `nonsense`"):
        build_model(ModelSection(config=model_config("llama"), attention="nonsense"), "fp32")


def draw(family: str, seed: int = 0, wanted: set[str] | None = None) -> dict[str, torch.Tensor]:
    wanted = everything(build(family)) if wanted is None else wanted
    return dict(initial_weights(lambda: build(family), seed, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_depend_only_on_seed(family: str) -> None:
    whole, again, other = draw(family), draw(family), draw(family, seed=1)
    assert whole.keys() == again.keys() == everything(build(family))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    drawn = [name for name, tensor in whole.items() if tensor.ndim > 1 and tensor.any()]  # some biases are zero
    assert not [name for name in drawn if torch.equal(whole[name], other[name])]
    (last,) = draw(family, wanted={sorted(drawn)[-1]}).items()
    assert torch.equal(last[1], whole[last[0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_follow_rules_of_family(family: str) -> None:
    """Mean and standard deviation of each tensor match transformers, and blocks are not copies of each other."""
    model, reference, weights = build(family), plain(family), draw(family)
    for name, expected in reference.state_dict().items():
        if name not in weights:
            assert name in model.all_tied_weights_keys
            continue
        drawn, expected = weights[name].detach().float(), expected.float()
        if expected.std(correction=0) == 0:
            assert torch.equal(drawn, expected), name
        elif expected.numel() >= 256:
            assert drawn.std() == pytest.approx(float(expected.std()), rel=0.2), name
    same = [n for n in weights if ".0." in n and n.endswith("q_proj.weight")]
    assert same
    assert not any(torch.equal(weights[n], weights[n.replace(".0.", ".1.")]) for n in same)


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_match_transformers_and_tied_weights_are_shared(family: str, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, model={"config": model_config(family)}), [])
    with process_group() as process:
        model = build_model(config.model, config.train.precision)
        parallelize_model(model, build_mesh(config, process), config, load=False)
        buffers = dict(model.named_buffers())
        expected = dict(plain(family).named_buffers())
        assert buffers.keys() == expected.keys()
        assert any("inv_freq" in name for name in buffers)
        assert [name for name in buffers if not torch.equal(buffers[name], expected[name])] == []
        tied = model.config.tie_word_embeddings
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_model_without_blocks_raises() -> None:
    model = build("llama")
    for part in model.modules():
        part._no_split_modules = []
    with pytest.raises(UserError, match="_no_split_modules"):
        read_facts(model)


PATTERNS = {
    "plain": Pattern(),
    "scale": Pattern(scale=0.3),
    "window": Pattern(window=4),
    "window of one": Pattern(window=1),
    "window longer than samples": Pattern(window=100),
    "softcap": Pattern(softcap=1.5),
    "softcap and window": Pattern(softcap=1.5, window=4, scale=0.5),
    "sinks": Pattern(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "sinks and window": Pattern(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), window=3),
    "both ways": Pattern(causal=False),
}


def masked_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], p: Pattern) -> torch.Tensor:
    """Attention by its definition: one query and one key at a time."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    heads, tokens, width = q.shape[1:]
    out = torch.zeros(1, tokens, heads, width, dtype=q.dtype)
    group = heads // k.shape[1]
    scale = p.scale if p.scale is not None else 1 / math.sqrt(width)
    for h in range(heads):
        for i in range(tokens):
            seen = [
                j
                for j in range(tokens)
                if sample[i] == sample[j] and (j <= i or not p.causal) and (p.window is None or abs(i - j) < p.window)
            ]
            logits = torch.stack([(q[0, h, i] * k[0, h // group, j]).sum() * scale for j in seen])
            if p.softcap is not None:
                logits = p.softcap * (logits / p.softcap).tanh()
            weights = logits.exp() / (logits.exp().sum() + (0 if p.sinks is None else p.sinks[h].exp()))
            out[0, i, h] = (weights[:, None] * torch.stack([v[0, h // group, j] for j in seen])).sum(0)
    return out


@pytest.mark.parametrize(
    ("name", "kv_heads"), [*((name, 2) for name in PATTERNS), ("plain", 1), ("plain", 4), ("softcap and window", 4)]
)
def test_packed_attention_matches_masked_softmax_forward_and_backward(name: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    lengths, pattern = [1, 6, 3], PATTERNS[name]
    tensors = [
        torch.randn(1, heads, 10, 4, dtype=torch.float64, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    ]
    learned = [*tensors, pattern.sinks.requires_grad_()] if pattern.sinks is not None else tensors
    boundaries = Boundaries(torch.tensor([0, 1, 7, 10], dtype=torch.int32), 6)
    expected = masked_softmax(*tensors, lengths, pattern)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), learned)
    for kernel in (per_sample, packed_attention):
        out = kernel(*tensors, boundaries, pattern)
        assert out.shape == expected.shape
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((out * weight).sum(), learned)
        torch.testing.assert_close(found, gradients, rtol=1e-10, atol=1e-12)
