"""Sequence parallelism against one process: slices, the ring's blocks, and real processes exchanging over gloo.

Eight ranks are started once and go through all cases; rank 0 compares what all of them computed with `per_sample` and
with a softmax under a mask written here, and the tests read the errors.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from omnizoo.config.errors import UserError
from omnizoo.config.sections.parallel import ParallelSection
from omnizoo.ops import torch_private
from omnizoo.ops.attention import blocks
from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans, BidirectionalTokens
from omnizoo.ops.attention.blocks import Blocks, accumulator, attend_blocks, attend_blocks_backward
from omnizoo.ops.attention.packed import Boundaries, Pattern, _visible, packed_attention, per_sample
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallel.sequence.sequence_parallel import SequenceParallel, visible_blocks
from omnizoo.parallel.sequence.slicing import ring_runs, slice_tokens
from omnizoo.parallel.sequence.ulysses import check_heads, split_heads

WORLD = 8
CPU = torch.device("cpu")
lengths_of_packs = st.lists(st.integers(1, 70), min_size=1, max_size=12)
rings = st.integers(1, 6)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- slices


@given(lengths_of_packs, rings, st.integers(1, 6))
def test_slices_partition_tokens_evenly(lengths, ring, ulysses):
    slices = slice_tokens(lengths, ring, ulysses)
    assert len(slices) == ring * ulysses
    assert all(piece.dtype == np.int64 for piece in slices)
    assert sorted(np.concatenate(slices).tolist()) == list(range(sum(lengths)))
    counts = [len(piece) for piece in slices]
    assert max(counts) - min(counts) <= 1


@given(lengths_of_packs, st.integers(1, 6))
def test_slices_without_ring_are_contiguous_and_ordered(lengths, ulysses):
    assert np.concatenate(slice_tokens(lengths, 1, ulysses)).tolist() == list(range(sum(lengths)))


@given(st.lists(st.integers(500, 3000), min_size=1, max_size=5), st.integers(2, 8))
def test_ring_ranks_have_equal_attention_work_per_sample(lengths, ring):
    for sample, length in enumerate(lengths):
        work = [
            sum(sum(range(run.position + 1, run.position + run.length + 1)) for run in runs[sample])
            for runs in ring_runs(lengths, ring)
        ]
        mean = length * (length + 1) / 2 / ring
        # A rank has at most 2 tokens more than another, and a token at most `length` of work; chunks move by as little.
        assert max(abs(w - mean) for w in work) <= 3 * length
        assert max(work) <= 1.05 * mean + 3 * length


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_each_head_is_on_one_rank_with_its_kv_head(kv_heads, group, ranks):
    heads = kv_heads * group
    split = split_heads(heads, kv_heads, min(ranks, heads))
    assert [h for first, end in split.heads for h in range(first, end)] == list(range(heads))
    for rank, ((first, end), (kv_first, kv_end)) in enumerate(zip(split.heads, split.kv_heads, strict=True)):
        needed = [head // group for head in range(first, end)]
        assert sorted(set(needed)) == list(range(kv_first, kv_end))
        repeats = split.kv_repeats(rank) or [(end - first) // (kv_end - kv_first)] * (kv_end - kv_first)
        assert [kv_first + kv for kv, n in enumerate(repeats) for _ in range(n)] == needed


def test_more_ulysses_ranks_than_heads_raise_with_nearest_layout():
    check_heads(Layout(ulysses=4, ring=2), heads=4, kv_heads=1)
    with pytest.raises(UserError, match=r"^parallel\.ulysses: 8 .* 6 attention heads .*ulysses: 4 .*ring: 2"):
        check_heads(Layout(ulysses=8), heads=6, kv_heads=2)
    with pytest.raises(UserError, match=r"^parallel\.ulysses: .*ulysses: 1 .*ring: 6"):
        check_heads(Layout(ulysses=2, ring=3), heads=1, kv_heads=1)


# ---------------------------------------------------------------- references and one process


def masked_softmax(
    q, k, v, lengths: list[int], pattern: Pattern, mutual: BidirectionalSpans | None = None
) -> torch.Tensor:
    """Attention as in a textbook, over the whole pack at once; `[1, T, H, Dv]`."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    position = torch.arange(len(sample))
    distance = position[:, None] - position[None, :]
    visible = sample[:, None] == sample[None, :]
    if pattern.causal:
        visible &= distance >= 0
    if pattern.window is not None:
        visible &= distance.abs() < pattern.window
    starts = np.cumsum([0, *lengths])
    for start, stretches in zip(starts, mutual.spans if mutual else [], strict=False):
        for first, count in stretches:
            a = int(start) + first
            together = torch.ones(count, count).bool()
            visible[a : a + count, a : a + count] |= together if mutual.over_windows else together.triu(1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale)
    if pattern.softcap is not None:
        logits = torch.tanh(logits / pattern.softcap) * pattern.softcap
    weights = torch.where(visible, logits, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if pattern.sinks is not None:
        total = total + pattern.sinks.exp().view(1, -1, 1, 1)
    return (weights / total @ v).transpose(1, 2)


def boundaries_of(lengths: list[int]) -> Boundaries:
    return Boundaries(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), max(lengths))


def inputs(lengths, heads, kv_heads, k_width, v_width, sinks, dtype, seed=0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v (and sinks) of a whole pack, and the gradient of its output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = sum(lengths)
    tensors = [normal(1, heads, tokens, k_width), normal(1, kv_heads, tokens, k_width)]
    tensors += [normal(1, kv_heads, tokens, v_width), *([normal(heads)] if sinks else [])]
    return tensors, normal(1, tokens, heads, v_width)


def run(attention, tensors, pattern, grad_out) -> list[torch.Tensor]:
    """Output and gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if len(leaves) > 3:
        pattern = replace(pattern, sinks=leaves[3])
    out = attention(*leaves[:3], pattern)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst difference, relative to the norm of its tensor (inputs are of size 1; a zero gradient has none)."""
    assert [x.shape for x in got] == [x.shape for x in expected]
    assert all(x.dtype == got[0].dtype for x in got)
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0))
        for a, b in zip(got, expected, strict=True)
    )


PATTERNS = {
    "causal": {},
    "scale": {"scale": 0.3},
    "window": {"window": 5},
    "wide window": {"window": 37},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 9, "softcap": 2.0, "sinks": True, "scale": 0.4},
    "bidirectional": {"causal": False},
    "bidirectional window": {"causal": False, "window": 7},
}


def pattern_of(options: dict[str, Any]) -> tuple[Pattern, bool]:
    return Pattern(**{key: value for key, value in options.items() if key != "sinks"}), "sinks" in options


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("shape", [(4, 4, 8, 8), (6, 2, 8, 4), (3, 1, 4, 8)])
def test_packed_attention_matches_references(name, shape):
    pattern, sinks = pattern_of(PATTERNS[name])
    lengths = [7, 1, 300, 2, 40]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        tensors, grad = inputs(lengths, *shape, sinks, dtype)
        got = run(lambda q, k, v, p: packed_attention(q, k, v, boundaries_of(lengths), p), tensors, pattern, grad)
        twin = run(lambda q, k, v, p: per_sample(q, k, v, boundaries_of(lengths), p), tensors, pattern, grad)
        textbook = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p), tensors, pattern, grad)
        assert error(got, textbook) < tolerance
        assert error(got, twin) < tolerance


# ---------------------------------------------------------------- the ring's blocks, all ranks in one process


def ring_in_one_process(tensors, lengths, ring, pattern, grad_out, mutual=None) -> list[torch.Tensor]:
    """What the ranks of a ring compute, one after the other and without sending anything."""
    runs, slices = ring_runs(lengths, ring), [torch.from_numpy(x) for x in slice_tokens(lengths, ring, 1)]
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    out, lse = accumulator(q, *q.shape[:2], v.shape[-1]), accumulator(q, *q.shape[:2])
    told = (mutual.spans, mutual.outer_window(pattern.window)) if mutual else ()
    blocks = [
        [Blocks(visible_blocks(a, b, pattern.causal, pattern.window, a is b, *told), CPU) for b in runs] for a in runs
    ]
    options = (0.3, pattern.softcap)
    for r, rows in enumerate(slices):
        own_out, own_lse = out[rows], lse[rows]
        for s in [r, *(s for s in range(ring) if s != r)]:
            attend_blocks(q[rows], k[slices[s]], v[slices[s]], blocks[r][s], *options, own_out, own_lse)
        out[rows], lse[rows] = own_out, own_lse
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for r, rows in enumerate(slices):
        for s, keys in enumerate(slices):
            parts = [x[at] for x, at in zip(grads, (rows, keys, keys), strict=True)]
            attend_blocks_backward(
                grad_out[0, rows], q[rows], k[keys], v[keys], out[rows], lse[rows], blocks[r][s], *options, *parts
            )
            for x, at, part in zip(grads, (rows, keys, keys), parts, strict=True):
                x[at] = part
    return [out.unsqueeze(0), *(x.transpose(0, 1).unsqueeze(0) for x in grads)]


@settings(max_examples=40, deadline=None)
@given(lengths_of_packs, rings, st.booleans(), st.none() | st.integers(1, 80), st.none() | st.just(2.0))
def test_ring_blocks_merge_to_full_attention(lengths, ring, causal, window, softcap):
    pattern = Pattern(causal, 0.3, window, softcap)
    tensors, grad = inputs(lengths, 2, 1, 3, 3, False, torch.float64)
    expected = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p), tensors, pattern, grad)
    assert error(ring_in_one_process(tensors, lengths, ring, pattern, grad), expected) < 1e-12


@st.composite
def packs_with_stretches(draw: Any) -> tuple[list[int], BidirectionalSpans]:
    """Samples, and runs of their tokens that see each other, told apart by the tokens 1 and 2 among zeros."""
    samples = draw(
        st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 25)), min_size=1), min_size=1, max_size=5)
    )
    rows = [np.concatenate([np.full(count, token) for token, count in sample]) for sample in samples]
    lengths = [len(row) for row in rows]
    kind = BidirectionalTokens((1, 2), over_windows=draw(st.booleans()))
    return lengths, kind.find(torch.from_numpy(np.concatenate(rows)), lengths)


@settings(max_examples=40, deadline=None)
@given(packs_with_stretches(), rings, st.none() | st.integers(1, 80), st.none() | st.just(2.0))
def test_ring_blocks_with_bidirectional_tokens_merge_to_full_attention(pack, ring, window, softcap):
    lengths, mutual = pack
    pattern = Pattern(True, 0.3, window, softcap)
    tensors, grad = inputs(lengths, 2, 1, 3, 3, False, torch.float64)
    expected = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p, mutual), tensors, pattern, grad)
    assert error(ring_in_one_process(tensors, lengths, ring, pattern, grad, mutual), expected) < 1e-12


@settings(max_examples=25, deadline=None)
@given(packs_with_stretches(), st.none() | st.integers(1, 80), st.sampled_from([{}, {"softcap": 2.0}, {"sinks": True}]))
def test_packed_attention_with_bidirectional_tokens_matches_references(pack, window, options):
    lengths, mutual = pack
    pattern, sinks = pattern_of(options | {"window": window})
    tensors, grad = inputs(lengths, 4, 2, 3, 3, sinks, torch.float64)
    found = []
    for attention in (packed_attention, per_sample):
        called = lambda q, k, v, p, a=attention: a(q, k, v, boundaries_of(lengths), p, mutual)  # noqa: E731
        found.append(run(called, tensors, pattern, grad))
    expected = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p, mutual), tensors, pattern, grad)
    assert error(found[0], expected) < 1e-12
    assert error(found[1], expected) < 1e-12


@settings(max_examples=30, deadline=None)
@given(packs_with_stretches(), st.integers(1, 30))
def test_bidirectional_spans_match_transformers_masks(pack, window):
    """Sample by sample, as the families that have them call its functions: over the window, or under it."""
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, sliding_window_overlay

    lengths, mutual = pack
    for number, length in enumerate(lengths):
        numbers = torch.zeros(length, dtype=torch.int64)
        for stretch, (first, count) in enumerate(mutual.spans[number], 1):
            numbers[first : first + count] = stretch
        over, under = (
            BidirectionalSpans(lengths, mutual.spans, over_windows=each).visible(number, CPU) for each in (True, False)
        )
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        block = blockwise_overlay(numbers[None] - 1)(0, 0, i, j)
        causal, near = causal_mask_function(0, 0, i, j), sliding_window_overlay(window)(0, 0, i, j)
        assert torch.equal(_visible(length, Pattern(), CPU, under), causal | block)
        assert torch.equal(_visible(length, Pattern(window=window), CPU, over), (causal & near) | block)
        assert torch.equal(_visible(length, Pattern(window=window), CPU, under), (causal | block) & near)


def flash_by_hand(q, k, v, pieces, scale):
    """What flash kernels promise: pieces by `cu_seqlens`, the window aligned at the last query and key."""
    out, lse = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype), torch.empty(q.shape[1], len(q), dtype=q.dtype)
    for (q0, q1), (k0, k1) in zip(*(pairwise(cu.tolist()) for cu in (pieces.cu_q, pieces.cu_k)), strict=True):
        offset = torch.arange(k1 - k0) - (torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0))
        visible = torch.ones_like(offset, dtype=torch.bool)
        if pieces.left >= 0:
            visible &= offset >= -pieces.left
        if pieces.right >= 0:
            visible &= offset <= pieces.right
        group = q.shape[1] // k.shape[1]
        keys, values = (x[k0:k1].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        logits = torch.where(visible, q[q0:q1].transpose(0, 1) @ keys.mT * scale, -torch.inf)
        assert visible.any(1).all()
        assert visible.any(0).all()
        lse[:, q0:q1] = logits.logsumexp(-1)
        out[q0:q1] = (logits.softmax(-1) @ values).transpose(0, 1)
    return out, lse


def flash_backward_by_hand(grad_out, q, k, v, out, lse, pieces, scale):
    """By autograd: a piece's part of the whole is weighted by its own share of the log-sum-exp."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        part, part_lse = flash_by_hand(*leaves, pieces, scale)
        share = (part_lse - lse).exp().T.unsqueeze(-1)
        delta = (grad_out * out).sum(-1, keepdim=True)
        # d loss = grad_out . d(share * part) - delta * d share, with the total's log-sum-exp held fixed
        return torch.autograd.grad((grad_out * share * part).sum() - (delta * share).sum(), leaves)


@contextmanager
def flash_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_calls", lambda parts, q, softcap: parts.grouped)
        patch.setattr(torch_private, "flash_cuda", flash_by_hand)
        patch.setattr(torch_private, "flash_cuda_backward", flash_backward_by_hand)
        yield


@settings(max_examples=25, deadline=None)
@given(lengths_of_packs, rings, st.booleans(), st.none() | st.integers(1, 80))
def test_grouped_flash_calls_match_single_blocks(lengths, ring, causal, window):
    pattern = Pattern(causal, 0.3, window)
    tensors, grad = inputs(lengths, 2, 1, 4, 3, False, torch.float64)
    expected = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p), tensors, pattern, grad)
    with flash_kernels():
        assert error(ring_in_one_process(tensors, lengths, ring, pattern, grad), expected) < 1e-12


@settings(max_examples=25, deadline=None)
@given(packs_with_stretches(), rings, st.none() | st.integers(1, 80))
def test_grouped_flash_calls_support_bidirectional_tokens(pack, ring, window):
    lengths, mutual = pack
    pattern = Pattern(True, 0.3, window)
    tensors, grad = inputs(lengths, 2, 1, 4, 3, False, torch.float64)
    expected = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p, mutual), tensors, pattern, grad)
    with flash_kernels():
        assert error(ring_in_one_process(tensors, lengths, ring, pattern, grad, mutual), expected) < 1e-12


def test_bidirectional_tokens_add_one_flash_call():
    lengths = [700, 300]
    mutual = BidirectionalSpans(lengths, [[(10, 256), (300, 100)], [(0, 30)]])
    assert len(mutual.blocks(None, CPU).grouped) == len(mutual.blocks(200, CPU).grouped) == 2
    over = BidirectionalSpans(lengths, mutual.spans, over_windows=True)
    assert len(over.blocks(200, CPU).grouped) == 3  # and one that looks back over windows
    assert not BidirectionalSpans(lengths, [[], []]).affects(True, None)
    assert not BidirectionalSpans(lengths, mutual.spans, everywhere=False).affects(True, None)


def test_causal_ring_makes_one_flash_call_per_step():
    runs = ring_runs([40, 16, 100, 33], 4)
    for mine in runs:
        assert all(
            len(Blocks(visible_blocks(mine, theirs, True, None, theirs is mine), CPU).grouped) == 1 for theirs in runs
        )


# What omnizoo/ops/torch_private.py calls.
SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "_flash_attention_forward": (
        "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
        "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, Tensor? block_table=None, "
        "int? num_splits=None) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask)"
    ),
    "_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, "
        "Tensor unused, *, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}


def test_private_torch_ops_have_expected_schemas():
    for name, schema in SCHEMAS.items():
        assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{schema}"


# ---------------------------------------------------------------- real processes


@dataclass(frozen=True)
class Case:
    ulysses: int
    ring: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    widths: tuple[int, int] = (8, 8)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    mutual: tuple[tuple[tuple[int, int], ...], ...] | None = None  # of each sample: stretches that see each other

    @property
    def seen(self) -> BidirectionalSpans | None:
        return None if self.mutual is None else BidirectionalSpans(self.lengths, self.mutual)


PACK = (19, 1, 50, 3, 2, 27, 8)
LAYOUTS = {"ulysses 4": (4, 1), "ring 4": (1, 4), "ulysses 2 x ring 2": (2, 2)}
HEADS = {
    "as many kv heads as heads": Case(0, 0, 4, 4, PACK),
    "one kv head": Case(0, 0, 4, 1, PACK),
    "kv heads fewer than ranks": Case(0, 0, 8, 2, PACK),
    "6 heads, 3 kv heads": Case(0, 0, 6, 3, PACK),
    "6 heads, 1 kv head": Case(0, 0, 6, 1, PACK, options={"sinks": True}),
    "irregular groups": Case(0, 0, 10, 5, PACK, options={"sinks": True}),
    "irregular groups, capped": Case(0, 0, 15, 5, PACK, options={"softcap": 2.0}),
}
TOKENS = {
    "fp32": Case(0, 0, 8, 4, PACK, options=PATTERNS["all"], dtype=torch.float32),
    "fp32, plain": Case(0, 0, 8, 4, PACK, dtype=torch.float32),
    "wider keys than values": Case(0, 0, 8, 8, PACK, (12, 8), {"sinks": True}),
    "wider values than keys": Case(0, 0, 8, 2, PACK, (4, 8), {"window": 6}),
    "fewer tokens than ranks": Case(0, 0, 8, 4, (2,)),
    "one token": Case(0, 0, 8, 4, (1,), options={"sinks": True}),
    "single-token samples": Case(0, 0, 8, 4, (1,) * 9),
    "a long sample": Case(0, 0, 4, 2, (701, 30), options={"window": 20}),
}
ON_FOUR = {
    "ulysses 4": ("causal", "sinks", "all", "bidirectional window"),
    "ring 4": tuple(PATTERNS),
    "ulysses 2 x ring 2": ("causal", "wide window", "all", "bidirectional"),
}
STRETCHES = (((3, 20), (30, 31)), (), ((0, 7), (20, 1), (22, 9)))
CASES = {
    **{
        f"{layout}, {name}": Case(*LAYOUTS[layout], 8, 4, PACK, options=PATTERNS[name])
        for layout, names in ON_FOUR.items()
        for name in names
    },
    **{
        f"{layout}, {name}": replace(case, ulysses=ulysses, ring=ring)
        for layout, (ulysses, ring) in LAYOUTS.items()
        for name, case in {**(HEADS if ulysses > 1 else {}), **TOKENS}.items()
    },
    "ulysses 8": Case(8, 1, 8, 2, PACK),
    "ulysses 8, 9 heads": Case(8, 1, 9, 3, PACK, options={"sinks": True}),
    "ring 8": Case(1, 8, 4, 2, PACK, options={"sinks": True}),
    "ring 8, window": Case(1, 8, 4, 2, PACK, options={"window": 6}),
    "ulysses 4 x ring 2": Case(4, 2, 6, 2, PACK),
    "ulysses 2 x ring 4, few tokens": Case(2, 4, 6, 2, (3, 2)),
    **{
        f"{name}, tokens that see each other": Case(*layout, 8, 4, (61, 5, 40), options=options, mutual=STRETCHES)
        for name, layout, options in (
            ("ulysses 2", (2, 1), {"window": 9}),
            ("ring 4", (1, 4), {}),
            ("ulysses 2 x ring 4", (2, 4), {"window": 12, "sinks": True}),
        )
    },
}


def tensors_of(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, Pattern]:
    pattern, sinks = pattern_of(case.options)
    return *inputs(case.lengths, case.heads, case.kv_heads, *case.widths, sinks, case.dtype), pattern


def meshes() -> dict[tuple[int, int], Mesh]:
    """One for each layout; where it is smaller than the world, its groups take turns with the cases."""
    process = Process(dist.get_rank(), WORLD, dist.get_rank(), CPU)
    made = {}
    for ulysses, ring in sorted({(case.ulysses, case.ring) for case in CASES.values()}):
        config = SimpleNamespace(
            parallel=ParallelSection(ulysses=ulysses, ring=ring),
            train=SimpleNamespace(packs_per_step=WORLD, samples_per_step=None, micro_batch=1, precision="fp32"),
        )
        made[ulysses, ring] = build_mesh(config, process)
    return made


class Traffic:
    """Elements this rank hands to each collective, in order."""

    def __init__(self) -> None:
        self.all_to_all: list[int] = []
        self.sent: list[int] = []
        exchange, pass_on = dist.all_to_all_single, dist.batch_isend_irecv

        def count_exchange(received: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.all_to_all.append(sent.numel())
            return exchange(received, sent, *args, **kwargs)

        def count_pass(operations: list[Any]) -> Any:
            self.sent += [operation.tensor.numel() for operation in operations if operation.op is dist.isend]
            return pass_on(operations)

        dist.all_to_all_single, dist.batch_isend_irecv = count_exchange, count_pass

    def take(self) -> tuple[list[int], list[int]]:
        taken = self.all_to_all[:], self.sent[:]
        self.all_to_all.clear()
        self.sent.clear()
        return taken


def on_each_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    traffic, grids, results = Traffic(), meshes(), {}
    for number, (name, case) in enumerate(CASES.items()):
        mesh = grids[case.ulysses, case.ring]
        if number % mesh.layout.dp == mesh.dp_rank:
            with keep_precision("fp64" if case.dtype == torch.float64 else "fp32"):
                results[name] = on_one_rank(case, mesh, traffic)
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, results)
    # The reference is the slow part: each rank compares its share of the cases.
    errors = {
        name: compare(case, [r[name] for r in gathered if name in r]) for name, case in list(CASES.items())[rank::WORLD]
    }
    torch.save((errors, {name: r["traffic"] for name, r in results.items()}), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_one_rank(case: Case, mesh: Mesh, traffic: Traffic) -> dict[str, Any]:
    tensors, grad, pattern = tensors_of(case)
    sequence = SequenceParallel(mesh, case.lengths, False, case.seen)
    own = [x[:, :, sequence.index] for x in tensors[:3]] + tensors[3:]
    own_grad = grad[:, sequence.index]
    leaves = [x.detach().requires_grad_() for x in own]
    traffic.take()
    out = sequence(*leaves[:3], replace(pattern, sinks=leaves[3] if len(leaves) > 3 else None))
    forward = traffic.take()
    got = [out.detach(), *torch.autograd.grad(out, leaves, own_grad)]
    backward = traffic.take()
    other = SequenceParallel(mesh, case.lengths, True, case.seen)
    again = run(lambda q, k, v, p: checkpoint(other, q, k, v, p, use_reentrant=False), own, pattern, own_grad)
    same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return {
        "index": sequence.index,
        "got": got,
        "same": same,
        "traffic": (len(sequence.index), forward, backward),
    }


def compare(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the parts of the ranks together and compare with one process."""
    tensors, grad, pattern = tensors_of(case)
    boundaries, precise = boundaries_of(list(case.lengths)), [x.double() for x in tensors]
    lengths, seen = list(case.lengths), case.seen
    textbook = run(lambda q, k, v, p: masked_softmax(q, k, v, lengths, p, seen), precise, pattern, grad.double())
    twin = run(lambda q, k, v, p: per_sample(q, k, v, boundaries, p, seen), tensors, pattern, grad)
    order = torch.cat([rank["index"] for rank in ranks]).argsort()
    parts = list(zip(*(rank["got"] for rank in ranks), strict=True))
    whole = [torch.cat(parts[0], 1)[:, order]] + [torch.cat(x, 2)[:, :, order] for x in parts[1:4]]
    whole += [torch.stack(x).sum(0) for x in parts[4:]]  # sinks: the sum over ranks, as FSDP makes it
    same = all(rank["same"] for rank in ranks)
    return {"textbook": error(whole, textbook), "one process": error(whole, twin), "same": same}


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Errors by case, and traffic by case and rank."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once, before any thread exists
    threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=on_each_rank, args=(rank, folder), daemon=True) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(500)
            assert [process.exitcode for process in ranks] == [0] * WORLD
        finally:
            for process in ranks:
                process.kill()
            os.environ.pop("OMP_NUM_THREADS") if threads is None else os.environ.update(OMP_NUM_THREADS=threads)
        loaded = [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    errors = {name: value for errors, _ in loaded for name, value in errors.items()}
    return errors, {name: [traffic[name] for _, traffic in loaded if name in traffic] for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_one_process(results, name):
    tolerance = 1e-12 if CASES[name].dtype == torch.float64 else 2e-6
    assert results[0][name]["textbook"] < tolerance
    assert results[0][name]["one process"] < tolerance


@pytest.mark.slow
def test_overlap_and_recomputation_keep_results_bitwise(results):
    assert [name for name, result in results[0].items() if not result["same"]] == []


@pytest.mark.slow
def test_ulysses_makes_four_all_to_alls_per_pass(results):
    for name, case in CASES.items():
        ranks = results[1][name]
        if case.ulysses == 1:
            assert all(traffic[way][0] == [] for traffic in ranks for way in (1, 2))
            continue
        split = split_heads(case.heads, case.kv_heads, case.ulysses)
        kv_heads = sum(end - first for first, end in split.kv_heads)
        if case.kv_heads % case.ulysses == 0:
            assert kv_heads == case.kv_heads, "nothing is sent twice"
        k_width, v_width = case.widths
        for rank, (tokens, (forward, _), (backward, _)) in enumerate(ranks):
            assert abs(tokens - sum(case.lengths) / (case.ulysses * case.ring)) < 1
            first = rank // case.ulysses * case.ulysses
            gathered = sum(other[0] for other in ranks[first : first + case.ulysses])
            own, own_kv = (
                gathered * (ranges[rank % case.ulysses][1] - ranges[rank % case.ulysses][0])
                for ranges in (split.heads, split.kv_heads)
            )
            query, keys, values, out = (
                *(tokens * case.heads * k_width, tokens * kv_heads * k_width),
                *(tokens * kv_heads * v_width, tokens * case.heads * v_width),
            )
            assert forward == [query, keys, values, own * v_width]
            assert backward == [out, own * k_width, own_kv * k_width, own_kv * v_width]


@pytest.mark.slow
def test_ring_sends_keys_values_and_gradients_once_per_rank(results):
    for name, case in CASES.items():
        split = split_heads(case.heads, case.kv_heads, case.ulysses)
        once = sum(case.lengths) * sum(end - first for first, end in split.kv_heads) * sum(case.widths)
        forward, backward = (sum(sum(traffic[way][1]) for traffic in results[1][name]) for way in (1, 2))
        assert forward == once * (case.ring - 1)
        assert backward == (once * (2 * case.ring - 1) if case.ring > 1 else 0)


def test_attention_dropout_with_ring_raises():
    sequence = SequenceParallel.__new__(SequenceParallel)
    sequence.ring, sequence.ulysses = 4, 2
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UserError, match=r"^parallel\.ring: 4 .* 0\.1\. .*ulysses: 8"):
        sequence(q, q, q, Pattern(dropout=0.1))
