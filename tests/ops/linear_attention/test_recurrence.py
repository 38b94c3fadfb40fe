"""Layers with a state along the sequence: our rules against the recurrence step by step, and any split over ranks
against one process, with what it sends."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import step_by_step

from omnizoo.ops.linear_attention.chunked_rules import delta_rule, linear_rule
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs, run_recurrence
from omnizoo.ops.linear_attention.short_convolution import convolve
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence.recurrent_states import Recurrence, find_stretches
from omnizoo.parallel.sequence.slicing import slice_tokens
from omnizoo.verification.rank_processes import run_in_processes

HEADS, GROUPS, DEEP, WIDE, CHANNELS, TAPS = 6, 2, 5, 7, 7, 4
KINDS = ("delta", "delta by channel", "linear")


def drawn(lengths: list[int], kind: str) -> RecurrentInputs:
    """The steps of a pack, at random."""
    tokens, dice = sum(lengths), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=dice)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=dice)

    groups = GROUPS if kind == "linear" else HEADS
    key = F.normalize(normal(tokens, groups, DEEP), dim=-1)
    decay = -2 * uniform(tokens, HEADS, *([DEEP] if kind == "delta by channel" else []))
    query, value, beta = normal(tokens, groups, DEEP), normal(tokens, HEADS, WIDE), uniform(tokens, HEADS)
    return RecurrentInputs(query, key, value, decay, beta, is_delta=kind != "linear", scale=0.5)


def leaves(steps: RecurrentInputs) -> list[torch.Tensor]:
    return [steps.query, steps.key, steps.value, steps.decay, steps.beta]


def learning(steps: RecurrentInputs) -> RecurrentInputs:
    return steps.map_tensors(lambda x: x.detach().clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[5, 130, 64, 1, 0, 77], [1]])
def test_chunked_rule_matches_recurrence(lengths: list[int], kind: str) -> None:
    state = torch.randn(len(lengths), HEADS, DEEP, WIDE, dtype=torch.float64)
    steps, found = drawn(lengths, kind), []
    for rule in (step_by_step, delta_rule if steps.is_delta else linear_rule):
        own = [x.clone().requires_grad_() for x in (*leaves(steps), state)]
        out, after = rule(*own[:5], lengths, own[5], **({"is_delta": steps.is_delta} if rule is step_by_step else {}))
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((out * weights).sum() + after.square().sum(), own)
        found.append((out.detach(), after.detach(), *gradients))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_stretches_contain_each_token_once(lengths: list[int], ring: int, ulysses: int) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    slices = slice_tokens(lengths, ring, ulysses)
    seen = []
    for tokens, held in zip(slices, find_stretches(slices, lengths), strict=True):
        for number, stretch in enumerate(held):
            assert stretch.index == number
            first = starts[stretch.sample] + stretch.position
            assert tokens[stretch.first_token : stretch.first_token + stretch.length].tolist() == list(
                range(first, first + stretch.length)
            )
            assert 0 < stretch.length <= lengths[stretch.sample] - stretch.position
            seen += list(range(first, first + stretch.length))
        assert sum(stretch.length for stretch in held) == len(tokens)
    assert sorted(seen) == list(range(sum(lengths)))


class Counted:
    """Bytes that this rank sends to others by all-to-alls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.bytes, plain = 0, dist.all_to_all_single

        def counting(
            out: torch.Tensor,
            given: torch.Tensor,
            received: list[int],
            sent: list[int],
            *rest: object,
            **kwargs: object,
        ):  # type: ignore[no-untyped-def]
            row = given.numel() // max(1, len(given)) * given.itemsize
            self.bytes += row * sum(count for other, count in enumerate(sent) if other != rank)
            return plain(out, given, received, sent, *rest, **kwargs)

        monkeypatch.setattr(dist, "all_to_all_single", counting)


def on_ranks(process: Process) -> None:
    """Both ways, outputs, gradients and bytes, against all tokens in one place; packs with ranks that hold none."""
    packs = [[37, 1, 90, 4], [3, 2], [130], [1], [16] * 4]
    for kind, lengths in [(kind, lengths) for number, lengths in enumerate(packs) for kind in KINDS[number % 2 :: 2]]:
        whole = learning(drawn(lengths, kind))
        out = run_recurrence(whole, lengths)[0]
        pulled = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()  # any gradient of the output
        expected = torch.autograd.grad((out * pulled).sum(), leaves(whole))
        for ring, ulysses in ((1, 4), (2, 2), (4, 1)):
            slices = slice_tokens(lengths, ring, ulysses)
            index = torch.from_numpy(slices[process.rank])
            group = dist.group.WORLD
            assert group is not None
            recurrence = Recurrence(group, process.rank, slices, lengths, torch.device("cpu"), overlap=False)
            for by in ("states", "heads"):
                own = learning(whole.map_tensors(lambda x, index=index: x[index]))  # type: ignore[misc]
                with pytest.MonkeyPatch.context() as patch:
                    counted = Counted(patch, process.rank)
                    found = recurrence.run_recurrence(own, by)
                    forward = counted.bytes
                    gradients = torch.autograd.grad((found * pulled[index]).sum(), leaves(own))
                if recurrence.has_split_samples:
                    assert forward == recurrence.bytes_sent(own)[by][process.rank]
                    total = torch.tensor([forward, counted.bytes - forward])
                    dist.all_reduce(total)
                    assert total[0] == total[1]  # backward sends the same, the other way
                torch.testing.assert_close(found, out[index], rtol=0, atol=1e-11)
                for gradient, there in zip(gradients, expected, strict=True):
                    torch.testing.assert_close(gradient, there[index], rtol=0, atol=1e-11)


def convolutions_on_ranks(process: Process) -> None:
    for lengths in ([37, 1, 90, 4], [3, 2], [1]):
        dice = torch.Generator().manual_seed(0)
        shapes = ((sum(lengths), CHANNELS), (CHANNELS, TAPS), (CHANNELS,))
        whole = [torch.randn(shape, dtype=torch.float64, generator=dice).requires_grad_() for shape in shapes]
        nothing = torch.zeros(len(lengths), TAPS - 1, CHANNELS, dtype=torch.float64)
        out = convolve(*whole, lengths, nothing)  # type: ignore[arg-type]  # a list of tensors
        for sample, x in zip(out.split(lengths), whole[0].split(lengths), strict=True):
            padded = F.pad(x.T, (TAPS - 1, 0))[None]
            alone = F.conv1d(padded, whole[1][:, None], whole[2], groups=CHANNELS)[0].T
            torch.testing.assert_close(sample, alone, rtol=0, atol=1e-12)
        pulled = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
        expected = torch.autograd.grad((out * pulled).sum(), whole)
        for ring, ulysses in ((1, 4), (2, 2), (4, 1)):
            slices = slice_tokens(lengths, ring, ulysses)
            index = torch.from_numpy(slices[process.rank])
            group = dist.group.WORLD
            assert group is not None
            recurrence = Recurrence(group, process.rank, slices, lengths, torch.device("cpu"), overlap=False)
            own = [(x if i else x[index]).detach().clone().requires_grad_() for i, x in enumerate(whole)]
            found = recurrence.convolve(*own)
            torch.testing.assert_close(found, out[index], rtol=0, atol=1e-11)
            gradients = torch.autograd.grad((found * pulled[index]).sum(), own)
            for i, (gradient, there) in enumerate(zip(gradients, expected, strict=True)):
                if i:
                    dist.all_reduce(gradient := gradient.contiguous())
                torch.testing.assert_close(gradient, there if i else there[index], rtol=0, atol=1e-11)


def any_split(process: Process) -> None:
    on_ranks(process)
    convolutions_on_ranks(process)


@pytest.mark.slow
def test_split_recurrence_matches_one_process_and_predicted_bytes() -> None:
    run_in_processes(4, any_split)


def sent(lengths: list[int], steps: RecurrentInputs) -> dict[str, int]:
    """By the busiest of 4 ranks of a ring, in a forward pass."""
    slices = slice_tokens(lengths, 1, 4)
    recurrence = Recurrence(None, 0, slices, lengths, torch.device("cpu"), overlap=False)  # type: ignore[arg-type]  # nothing is sent
    return {way: max(costs) for way, costs in recurrence.bytes_sent(steps).items()}


def sizes(heads: int, groups: int, deep: int, wide: int, is_delta: bool) -> RecurrentInputs:
    """Of a layer in bf16, on meta."""
    with torch.device("meta"):
        key, gate = torch.empty(0, groups, deep, dtype=torch.bfloat16), torch.empty(0, heads)
        return RecurrentInputs(key, key, torch.empty(0, heads, wide, dtype=torch.bfloat16), gate, gate, is_delta)


def test_predicted_bytes_select_the_cheaper_method() -> None:
    """States do not grow with the tokens, heads do. docs/explanation/parallelism.md has these figures."""
    qwen = sizes(heads=32, groups=32, deep=128, wide=128, is_delta=True)  # Qwen3.5 35B-A3B
    long = sent([4 * 16384], qwen)
    assert long["states"] == 3 * 32 * 128 * 256 * 4  # 12 MiB: a pair from the first rank to each of the others
    assert long["heads"] == 16384 * 3 // 4 * 32 * (4 * 128 * 2 + 2 * 4)
    assert sent([8192], qwen)["states"] == long["states"]
    assert sent([16384] * 4, qwen)["states"] == 0  # no sample is cut
    nemotron = sent([4 * 16384], sizes(heads=128, groups=8, deep=128, wide=64, is_delta=False))  # Nemotron-H 8B
    assert nemotron["states"] == 3 * 128 * 128 * 65 * 4
    assert nemotron["heads"] == 16384 * 3 // 4 * (128 * (2 * 64 * 2 + 2 * 4) + 8 * 2 * 128 * 2)
