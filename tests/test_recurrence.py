"""Layers with a state along the sequence: our rules against the recurrence step by step, packs against one sample at a
time by transformers' own code, and any split over ranks against one process."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Model
from omnizoo.models.build import build_model
from omnizoo.models.stateful import DOORS
from omnizoo.ops import recurrence as ops
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence import slice_tokens
from omnizoo.parallel.states import Recurrence, stretches
from omnizoo.training.forward import packed_inputs
from omnizoo.verification.compare import verdict_of
from omnizoo.verification.prepare import prepare, with_family
from omnizoo.verification.world import in_world

ROOT = Path(__file__).parent.parent
HEADS, DEEP, WIDE, CHANNELS, TAPS = 4, 5, 6, 7, 4
TINY = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": LINEAR
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "pad_token_id": 0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
}


def drawn(lengths: list[int], by_channel: bool, seed: int = 0) -> list[torch.Tensor]:
    """Query, key, value, decay and beta of a pack, then input, weight and bias of a convolution."""
    tokens, dice = sum(lengths), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=dice)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=dice)

    key = F.normalize(normal(tokens, HEADS, DEEP), dim=-1)
    decay = -2 * uniform(tokens, HEADS, *([DEEP] if by_channel else []))
    rule = [normal(tokens, HEADS, DEEP), key, normal(tokens, HEADS, WIDE), decay, uniform(tokens, HEADS)]
    return [*rule, normal(tokens, CHANNELS), normal(CHANNELS, TAPS), normal(CHANNELS)]


def step_by_step(q: Any, k: Any, v: Any, g: Any, b: Any, lengths: list[int], state: Any) -> tuple[Any, Any]:
    out, after, at = [], [], 0
    for number, length in enumerate(lengths):
        s = state[number]
        for t in range(at, at + length):
            s = s * (g[t].exp()[:, None, None] if g.dim() == 2 else g[t].exp()[:, :, None])
            s = s + torch.einsum("hk,hv->hkv", k[t], b[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s)))
            out.append(torch.einsum("hk,hkv->hv", q[t], s))
        after.append(s)
        at += length
    return torch.stack(out), torch.stack(after)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("lengths", [[5, 130, 64, 1, 0, 77], [1]])
def test_the_rule_by_chunks_is_the_recurrence(lengths: list[int], by_channel: bool) -> None:
    state = torch.randn(len(lengths), HEADS, DEEP, WIDE, dtype=torch.float64)
    found = []
    for rule in (step_by_step, ops.delta_rule):
        leaves = [x.clone().requires_grad_() for x in (*drawn(lengths, by_channel)[:5], state)]
        out, after = rule(*leaves[:5], lengths, leaves[5])
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((out * weights).sum() + after.square().sum(), leaves)
        found.append((out.detach(), after.detach(), *gradients))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_stretches_are_all_tokens_once(lengths: list[int], ring: int, ulysses: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    slices = slice_tokens(lengths, ring, ulysses)
    seen = []
    for tokens, held in zip(slices, stretches(slices, lengths), strict=True):
        for number, stretch in enumerate(held):
            assert stretch.number == number
            first = starts[stretch.sample] + stretch.position
            assert tokens[stretch.at : stretch.at + stretch.length].tolist() == list(
                range(first, first + stretch.length)
            )
            assert 0 < stretch.length <= lengths[stretch.sample] - stretch.position
            seen += list(range(first, first + stretch.length))
        assert sum(stretch.length for stretch in held) == len(tokens)
    assert sorted(seen) == list(range(sum(lengths)))


def on_ranks(process: Process) -> None:
    """Both ways, outputs and gradients, against all tokens in one place; packs with ranks that hold none."""
    for number, lengths in enumerate([[37, 1, 90, 4], [3, 2], [130], [1], [16] * 4]):
        whole = [x.requires_grad_() for x in drawn(lengths, number % 2 == 1)]
        nothing = torch.zeros(len(lengths), TAPS - 1, CHANNELS, dtype=torch.float64)
        out, convolved = ops.delta_rule(*whole[:5], lengths)[0], ops.convolve(*whole[5:], lengths, nothing)
        for sample, x in zip(convolved.split(lengths), whole[5].split(lengths), strict=True):
            padded = F.pad(x.T, (TAPS - 1, 0))[None]
            alone = F.conv1d(padded, whole[6][:, None], whole[7], groups=CHANNELS)[0].T
            torch.testing.assert_close(sample, alone, rtol=0, atol=1e-12)
        # Any gradient of the output, the same on all ranks.
        pulled = [torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape).sin() for x in (out, convolved)]
        expected = torch.autograd.grad((out * pulled[0]).sum() + (convolved * pulled[1]).sum(), whole)
        for ring, ulysses in ((1, 4), (2, 2), (4, 1)):
            slices = slice_tokens(lengths, ring, ulysses)
            index = torch.from_numpy(slices[process.rank])
            group = dist.group.WORLD
            assert group is not None
            recurrence = Recurrence(group, process.rank, slices, lengths, torch.device("cpu"), overlap=False)
            for by in ("states", "heads"):
                own = [(x[index] if i < 6 else x).detach().clone().requires_grad_() for i, x in enumerate(whole)]
                found = recurrence.delta_rule(*own[:5], by=by), recurrence.convolve(*own[5:])
                gradients = torch.autograd.grad(
                    sum((x * p[index]).sum() for x, p in zip(found, pulled, strict=True)), own
                )
                for x, y in zip(found, (out, convolved), strict=True):
                    torch.testing.assert_close(x, y[index], rtol=0, atol=1e-11)
                for i, (gradient, there) in enumerate(zip(gradients, expected, strict=True)):
                    if i >= 6:
                        dist.all_reduce(gradient := gradient.contiguous())
                    torch.testing.assert_close(gradient, there[index] if i < 6 else there, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_any_split_over_ranks_is_one_process() -> None:
    in_world(4, on_ranks)


def test_the_way_that_sends_less_is_known_beforehand() -> None:
    """The sizes of Qwen3.5 35B-A3B: states do not grow with the tokens, heads do."""

    def costs(lengths: list[int]) -> dict[str, int]:
        slices = slice_tokens(lengths, 1, 4)
        recurrence = Recurrence(None, 0, slices, lengths, torch.device("cpu"), overlap=False)  # type: ignore[arg-type]  # nothing is sent
        return recurrence.elements(heads=32, deep=128, wide=128, decays_by_channel=False)

    long = costs([4 * 16384])
    assert long["states"] == 3 * 32 * 128 * 256  # a pair from the first rank to each of the others: 4 MiB in fp32
    assert long["heads"] == 16384 * 32 * (4 * 128 + 2) * 3 // 4
    assert costs([8192])["states"] == long["states"]
    assert costs([16384] * 4)["states"] == 0  # no sample is cut


def small(family: str, precision: str = "fp32") -> tuple[nn.Module, nn.Module]:
    """A model as we build it, and transformers' own with the same weights."""
    config = {"model_type": family, **TINY, **HYBRIDS[family]}
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        ours = build_model(Model(config=config), precision, "cpu")
        for name, parameter in ours.named_parameters():  # nothing begins as zero
            parameter.add_(0.1 * torch.randn(parameter.shape))
            if name.endswith("A_log"):  # slow decay: of states that are gone at once, gradients are mostly rounding
                parameter.sub_(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    theirs = theirs.to(next(ours.parameters()).dtype)
    for model in (ours, theirs):
        model.set_experts_implementation("eager")  # grouped matmuls take no fp64
    theirs.load_state_dict(ours.state_dict())
    return ours.train(), theirs.train()


def plain_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> tuple[Any, None]:
    """One sample, token by token, without the casts to fp32 of transformers' own rules."""
    q, k = (x[0] * torch.rsqrt(x[0].square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    nothing = value.new_zeros(1, value.shape[2], key.shape[3], value.shape[3])
    scaled = q * q.shape[-1] ** -0.5
    return step_by_step(scaled, k, value[0], g[0].to(q.dtype), beta[0], [value.shape[1]], nothing)[0][None], None


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_pack_is_its_samples_one_at_a_time_in_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = small(family, "fp64")
    for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"):
        monkeypatch.setattr(inspect.getmodule(type(theirs)), name, plain_rule, raising=False)
    lengths = [70, 3, 19]
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    boundaries = torch.tensor([0, 70, 73, 92], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = ours(input_ids=ids[None], position_ids=positions[None], **packed_inputs(boundaries, 70)).logits[0]
    alone = torch.cat([theirs(input_ids=sample[None], use_cache=False).logits[0] for sample in ids.split(lengths)])
    assert (packed - alone).norm() <= 1e-6 * alone.norm()
    weights = torch.randn(alone.shape, dtype=alone.dtype, generator=torch.Generator().manual_seed(1))
    for logits in (packed, alone):
        (logits * weights).sum().backward()
    worst = {}
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        worst[name] = float((own.grad - other.grad).norm() / other.grad.norm())
    assert max(worst.values()) <= 1e-5, max(worst, key=worst.__getitem__)


def test_other_models_keep_their_own_code() -> None:
    theirs = small("qwen3_5_text")[1]
    layers = [m for m in theirs.modules() if "causal_conv1d_fn" in inspect.unwrap(type(m).forward).__code__.co_names]
    assert layers
    for layer in layers:
        assert "forward" not in vars(layer)
        home = inspect.getmodule(type(layer))
        assert all(getattr(home, name).__module__ == home.__name__ for name in DOORS if hasattr(home, name))


def test_a_state_without_boundaries_is_an_error_and_not_a_leak() -> None:
    ours, _ = small("lfm2")
    ours.set_attn_implementation("eager")
    with pytest.raises(UserError, match="did not get the sample boundaries"):
        ours(input_ids=torch.arange(8)[None], use_cache=False)
    ours.eval()
    with torch.no_grad():  # as generation does it
        ours(input_ids=torch.arange(8)[None], use_cache=False)


def test_layers_that_nothing_is_known_of_are_refused() -> None:
    with pytest.raises(UserError, match=r"`bamba` has .* layers, which carry state across packed samples"):
        build_model(Model(config={"model_type": "bamba", "num_hidden_layers": 2}), "fp32")


@pytest.mark.slow
def test_a_hybrid_recomputes_and_agrees_in_fp64(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples/text_tiny.yaml", ["--parallel.recompute", "full"])
    layouts = prepare(with_family(config, "qwen3_5_moe_text"), 4, "dp2.uly2.ep4,ring4", "fp64", tmp_path)
    verdicts = [verdict_of(tmp_path, layout) for layout in layouts]
    assert [verdict.reason for verdict in verdicts if not verdict.passed] == []
