"""Which kernel does the math of layers with a state: packages that this machine does not have are stood in for, by
functions of their signatures that go token by token."""

import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import step_by_step

from omnizoo.ops.determinism import deterministic_algorithms
from omnizoo.ops.linear_attention import kernels
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs, advance, run_recurrence, run_without_states
from omnizoo.ops.linear_attention.short_convolution import convolve

HEADS, DEEP, WIDE = 2, 4, 3
LENGTHS = [37, 5]
KINDS = {"delta": "chunk_gated_delta_rule", "delta by channel": "chunk_kda", "linear": "chunk_simple_gla"}


class Calls:
    """What stand-ins were asked."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def rule(self, name: str) -> Any:
        def run(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor | None = None,
            scale: float | None = None,
            initial_state: torch.Tensor | None = None,
            output_final_state: bool = False,
            cu_seqlens: torch.Tensor | None = None,
            cu_seqlens_cpu: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.names.append(name)
            assert q.dtype == k.dtype == v.dtype == torch.bfloat16
            assert g.dtype == torch.float32
            assert initial_state is None or initial_state.dtype == torch.float32
            assert q.shape[:3] == k.shape[:3] == v.shape[:3]
            assert q.shape[0] == 1
            assert cu_seqlens is not None
            assert cu_seqlens_cpu is not None
            assert output_final_state
            assert scale is not None
            lengths = cu_seqlens.diff().tolist()
            if initial_state is None:
                initial_state = torch.zeros(len(lengths), v.shape[2], k.shape[3], v.shape[3])
            b = torch.ones_like(g) if beta is None else beta[0]
            tokens = (q[0].float() * scale, k[0].float(), v[0].float(), g[0], b.reshape(g.shape[1:3]))
            out, after = step_by_step(*tokens, lengths, initial_state, is_delta=beta is not None)
            return out.to(v.dtype)[None], after

        return run

    def convolution(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.names.append("causal_conv1d_fn")
        assert x.stride(1) == 1
        padded = F.pad(x.float(), (weight.shape[1] - 1, 0))
        return F.conv1d(padded, weight.float()[:, None], bias, groups=x.shape[1]).to(x.dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """As on a device with kernels, and with the packages."""
    found = Calls()
    modules: dict[str, dict[str, Any]] = {"fla": {}, "fla.ops": {}, "causal_conv1d": {}}
    modules["causal_conv1d"]["causal_conv1d_fn"] = found.convolution
    for module, name in kernels.RULES.values():
        modules[module] = {name: found.rule(name)}
    for name, members in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "has_triton", lambda device: True)
    kernels.find_kernel.cache_clear()
    yield found
    kernels.find_kernel.cache_clear()


def drawn(kind: str, dtype: torch.dtype = torch.bfloat16) -> RecurrentInputs:
    dice, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=dice)

    decay = -normal(HEADS, *([DEEP] if kind == "delta by channel" else [])).abs()
    groups = 1 if kind == "linear" else HEADS
    query, key, value = (x.to(dtype) for x in (normal(groups, DEEP), normal(groups, DEEP), normal(HEADS, WIDE)))
    is_delta = kind != "linear"
    return RecurrentInputs(query, key, value, decay, normal(HEADS).sigmoid(), is_delta, 0.5, is_unit=is_delta)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).norm() <= 0.02 * b.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_call_matches_plain_torch(
    kind: str, calls: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    steps = drawn(kind)
    out, after = run_recurrence(steps, LENGTHS)
    run_recurrence(steps, LENGTHS, after)
    assert calls.names == [KINDS[kind]] * 2
    module, _ = kernels.RULES[kind != "linear", kind == "delta by channel"]
    (message,) = (record.message for record in caplog.records if KINDS[kind] in record.message)  # logged once
    assert f"{module}.{KINDS[kind]}" in message
    # What ranks do with it: two stretches of a sample, joined by what the first does to a state.
    alone = run_without_states(steps, [20, 17, 5])
    state = advance(alone.effect[0], None, WIDE)
    joined = torch.cat([alone.out[:20], alone.out[20:37] + alone.contribution(1, state), alone.out[37:]])
    ended = advance(alone.effect[1], state, WIDE)
    monkeypatch.undo()
    plain, plain_after = run_recurrence(steps, LENGTHS)
    assert near(out, plain)
    assert near(after, plain_after)
    assert near(joined, plain)
    assert near(ended, plain_after[0])


def test_unsupported_precision_or_device_uses_plain_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run_recurrence(drawn("delta", torch.float32), LENGTHS)
    monkeypatch.undo()
    run_recurrence(drawn("delta"), LENGTHS)
    assert calls.names == []


def test_convolution_kernel_matches_plain_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=dice) for shape in ((42, 8), (8, 4), (8,)))
    before = torch.randn(2, 3, 8, generator=dice)
    found = convolve(x, weight, bias, LENGTHS, before)
    convolve(x[:, :7], weight[:7], bias[:7], LENGTHS, before[..., :7])  # channels in eights only
    assert calls.names == ["causal_conv1d_fn"]
    monkeypatch.undo()
    torch.testing.assert_close(found, convolve(x, weight, bias, LENGTHS, before), rtol=0, atol=1e-5)


def test_missing_kernel_package_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernels, "has_triton", lambda device: True)
    kernels.find_kernel.cache_clear()
    for _ in range(2):
        run_recurrence(drawn("linear"), LENGTHS)
    (message,) = (record.message for record in caplog.records)
    assert "Install fla" in message
    kernels.find_kernel.cache_clear()


def test_kernels_are_not_used_when_results_must_be_repeatable(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kernels._log_refusal.cache_clear()
    with deterministic_algorithms(True):
        for _ in range(2):
            run_recurrence(drawn("delta"), LENGTHS)
        convolve(torch.randn(42, 8), torch.randn(8, 4), None, LENGTHS, torch.zeros(2, 3, 8))
    assert calls.names == []
    messages = [record.message for record in caplog.records if "train.deterministic" in record.message]
    assert [message.split()[1] for message in messages] == ["fla", "causal_conv1d"]
