"""The recurrence of linear-attention and state-space layers, over runs of consecutive tokens of a sample.

`run_recurrence` selects the kernel for the device (`kernels`). `chunked_rules` has the plain torch versions that the
kernels are tested against. `apart` computes runs before their initial states are available, as sequence parallelism
needs it; parallel/sequence/recurrent_states.py joins the results.

Shapes: T tokens, N runs, L tokens of a run, H heads, G groups of heads, K width of keys, V width of values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from omnizoo.ops.linear_attention.chunked_rules import delta_rule, linear_rule
from omnizoo.ops.linear_attention.kernels import rule_kernel


@dataclass(frozen=True)
class RecurrentInputs:
    """Inputs of the recurrence on the state `S [K, V]` of each head.

    Each token decays the state, S <- exp(decay) S, then adds `beta k v` to it, or `beta k (v - k S)` by the delta rule,
    and then outputs `scale q S`.
    """

    query: torch.Tensor  # [T, G, K]; G divides H, and adjacent heads share a query and a key
    key: torch.Tensor  # [T, G, K]
    value: torch.Tensor  # [T, H, V]
    decay: torch.Tensor  # [T, H], or [T, H, K] for one decay per channel (delta rule only); at most 0
    beta: torch.Tensor  # [T, H]
    is_delta: bool  # whether to use the delta rule
    scale: float = 1.0
    is_unit: bool = False  # whether to normalize queries and keys to length 1

    @property
    def wide(self) -> torch.dtype:
        """The dtype of states, decays and betas: fp32, or float64 if the values are float64."""
        return torch.promote_types(self.value.dtype, torch.float32)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RecurrentInputs":
        """Return a copy with `change` applied to every tensor."""
        return replace(
            self,
            query=change(self.query),
            key=change(self.key),
            value=change(self.value),
            decay=change(self.decay),
            beta=change(self.beta),
        )


def run_recurrence(
    steps: RecurrentInputs, lengths: Sequence[int], state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over concatenated runs of tokens.

    Args:
        steps: The inputs of all tokens.
        lengths: Number of tokens of each run.
        state: `[N, H, K, V]`, the state before each run; None for zeros.

    Returns:
        The output `[T, H, V]` and the states after each run `[N, H, K, V]`, in fp32 or better.
    """
    kernel = rule_kernel(steps.value, steps.key.shape[2], steps.is_delta, steps.decay.dim() == 3)
    query, key, decay, beta = (x.to(steps.wide) for x in (steps.query, steps.key, steps.decay, steps.beta))
    if steps.is_unit:
        query, key = _unit(query), _unit(key)
    if kernel is not None and len(steps.value):
        # One launch for all runs. Queries, keys and values keep their 16-bit dtype; decays and states are fp32.
        narrow, heads = steps.value.dtype, steps.value.shape[1]
        query, key = (_to_heads(x.to(narrow), heads) for x in (query, key))
        value = steps.value if steps.is_delta else (steps.value.to(steps.wide) * beta.unsqueeze(-1)).to(narrow)
        given = (query, key, value, decay, beta) if steps.is_delta else (query, key, value, decay)
        return kernel(*given, lengths=lengths, scale=steps.scale, state=state)
    value = steps.value.to(steps.wide)
    if state is None:
        state = value.new_zeros(len(lengths), value.shape[1], key.shape[2], value.shape[2])
    if not len(value):
        # Without tokens, the output must still depend on every input, so that each gets a gradient.
        return (value + 0 * (query.sum() + key.sum() + decay.sum() + beta.sum())).to(steps.value.dtype), state
    if steps.is_delta:
        query, key = (_to_heads(x, value.shape[1]) for x in (query, key))
    rule = delta_rule if steps.is_delta else linear_rule
    out, after = rule(query * steps.scale, key, value, decay, beta, lengths, state)
    return out.to(steps.value.dtype), after


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Normalize the last dim to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each group for its heads: `[T, G, ...]` -> `[T, H, ...]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@dataclass(frozen=True)
class Apart:
    """Results of runs that were computed with initial states of zero, and how an initial state would change them."""

    out: torch.Tensor  # [T, H, V], output without initial states
    reads: Sequence[torch.Tensor]  # for each run [L, H or G, K]; times the initial state, its share of the output
    left: Sequence[torch.Tensor] | None  # for each run [L, H], decay since its start; None if included in `reads`
    effect: torch.Tensor  # [N, H, K, V + K or V + 1], final state, and the linear map or factor of an initial state

    def added(self, run: int, state: torch.Tensor) -> torch.Tensor:
        """Return what an initial state `[H, K, V]` adds to the output of a run, `[L, H, V]`."""
        reads = self.reads[run].transpose(0, 1)  # [H or G, L, K]
        by_group = state.to(reads.dtype).reshape(len(reads), len(state) // len(reads), *state.shape[1:])
        read = (reads.unsqueeze(1) @ by_group).flatten(0, 1).transpose(0, 1)
        return read if self.left is None else (read * self.left[run].unsqueeze(-1)).to(reads.dtype)


def apart(steps: RecurrentInputs, lengths: Sequence[int]) -> Apart:
    """Run the recurrence with initial states of zero, and compute how an initial state would change each run."""
    runs, heads, wide = len(lengths), *steps.value.shape[1:]
    deep = steps.key.shape[2]
    if not steps.is_delta:
        assert not steps.is_unit, "which only delta rules have"
        out, after = run_recurrence(steps, lengths)
        # The cumulative sum is taken per run: over all runs it would lose precision.
        left = [decay.cumsum(0).exp() for decay in steps.decay.to(steps.wide).split(list(lengths))]
        kept = torch.stack([each[-1] for each in left]) if left else after.new_zeros(0, heads)
        effect = torch.cat([after, kept[..., None, None].expand(-1, -1, deep, 1)], -1)
        return Apart(out, (steps.query * steps.scale).split(list(lengths)), left, effect)
    # Append K columns of zeros to the values, and start from a state that is zero in the columns of the values and the
    # identity in the appended ones. The appended columns of the output and of the final state are then the linear maps
    # by which any initial state would contribute to them.
    identity = torch.eye(deep, dtype=steps.wide, device=steps.value.device).expand(runs, heads, deep, deep)
    nothing = steps.value.new_zeros(runs, heads, deep, wide, dtype=steps.wide)
    padded = torch.cat([steps.value, steps.value.new_zeros(len(steps.value), heads, deep)], -1)
    out, effect = run_recurrence(replace(steps, value=padded), lengths, torch.cat([nothing, identity], -1))
    out, reads = out.split([wide, deep], -1)
    return Apart(out, reads.split(list(lengths)), None, effect)


def advance(effect: torch.Tensor, state: torch.Tensor | None, wide: int) -> torch.Tensor:
    """Return the state after a run, given its `effect` and the state before it (None: zeros).

    `wide` is the width of a value.
    """
    written, moved = effect[..., :wide], effect[..., wide:]
    if state is None:
        return written
    return written + (moved * state if moved.shape[-1] == 1 else moved @ state)
