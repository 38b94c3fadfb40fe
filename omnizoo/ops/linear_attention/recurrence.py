"""The recurrence of linear-attention and state-space layers, over runs of consecutive tokens of a sample.

`run_recurrence` selects the kernel for the device (`kernels`). `chunked_rules` has the plain torch versions that the
kernels are tested against. `run_without_states` computes runs before their initial states are available, as sequence
parallelism requires. parallel/sequence/recurrent_states.py joins the results.

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

    Each token first decays the state, S <- exp(decay) S. It then adds `beta k v` to the state, or `beta k (v - k S)`
    under the delta rule, and outputs `scale q S`.
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
    def wide_dtype(self) -> torch.dtype:
        """The dtype of states, decays and betas: fp32, or float64 if the values are float64."""
        return torch.promote_types(self.value.dtype, torch.float32)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RecurrentInputs":
        """Return a copy of these inputs with `change` applied to every tensor."""
        return replace(
            self,
            query=change(self.query),
            key=change(self.key),
            value=change(self.value),
            decay=change(self.decay),
            beta=change(self.beta),
        )


def run_recurrence(
    inputs: RecurrentInputs, lengths: Sequence[int], state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over concatenated runs of tokens.

    Args:
        inputs: The inputs of all tokens.
        lengths: Number of tokens of each run.
        state: `[N, H, K, V]`, the state before each run; None for zeros.

    Returns:
        The output `[T, H, V]` and the states after each run `[N, H, K, V]`, in fp32 or better.
    """
    kernel = rule_kernel(inputs.value, inputs.key.shape[2], inputs.is_delta, inputs.decay.dim() == 3)
    query, key, decay, beta = (x.to(inputs.wide_dtype) for x in (inputs.query, inputs.key, inputs.decay, inputs.beta))
    if inputs.is_unit:
        query = _unit(query)
        key = _unit(key)
    if kernel is not None and len(inputs.value):
        # One launch for all runs. Queries, keys and values keep their 16-bit dtype; decays and states are fp32.
        narrow_dtype = inputs.value.dtype
        heads = inputs.value.shape[1]
        query = _to_heads(query.to(narrow_dtype), heads)
        key = _to_heads(key.to(narrow_dtype), heads)
        if inputs.is_delta:
            return kernel(query, key, inputs.value, decay, beta, lengths=lengths, scale=inputs.scale, state=state)
        value = (inputs.value.to(inputs.wide_dtype) * beta.unsqueeze(-1)).to(narrow_dtype)
        return kernel(query, key, value, decay, lengths=lengths, scale=inputs.scale, state=state)

    value = inputs.value.to(inputs.wide_dtype)
    if state is None:
        state = value.new_zeros(len(lengths), value.shape[1], key.shape[2], value.shape[2])
    if not len(value):
        # Without tokens, the output must still depend on every input, so that every input gets a gradient.
        return (value + 0 * (query.sum() + key.sum() + decay.sum() + beta.sum())).to(inputs.value.dtype), state
    if inputs.is_delta:
        query = _to_heads(query, value.shape[1])
        key = _to_heads(key, value.shape[1])
    rule = delta_rule if inputs.is_delta else linear_rule
    out, states_after = rule(query * inputs.scale, key, value, decay, beta, lengths, state)
    return out.to(inputs.value.dtype), states_after


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Normalize the last dim to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat each group for its heads: `[T, G, ...]` -> `[T, H, ...]`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@dataclass(frozen=True)
class StatelessRuns:
    """Results of runs whose initial states are zero, and the data to compute the effect of other initial states."""

    out: torch.Tensor  # [T, H, V], output without initial states
    reads: Sequence[torch.Tensor]  # one [L, H or G, K] per run; its product with the initial state is added to `out`
    # One [L, H] per run: factor by which the state has decayed since the start of the run; None if `reads` already
    # includes it.
    decay: Sequence[torch.Tensor] | None
    effect: torch.Tensor  # [N, H, K, V + K or V + 1], final state, and the map or factor applied to an initial state

    def contribution(self, run: int, state: torch.Tensor) -> torch.Tensor:
        """Return the contribution of an initial state `[H, K, V]` to the output of a run, `[L, H, V]`."""
        reads = self.reads[run].transpose(0, 1)  # [H or G, L, K]
        groups = len(reads)
        by_group = state.to(reads.dtype).reshape(groups, len(state) // groups, *state.shape[1:])
        contribution = (reads.unsqueeze(1) @ by_group).flatten(0, 1).transpose(0, 1)
        if self.decay is None:
            return contribution
        return (contribution * self.decay[run].unsqueeze(-1)).to(reads.dtype)


def run_without_states(inputs: RecurrentInputs, lengths: Sequence[int]) -> StatelessRuns:
    """Run the recurrence with initial states of zero, and compute how an initial state would change each run."""
    if not inputs.is_delta:
        return _linear_without_states(inputs, lengths)

    runs = len(lengths)
    heads, value_width = inputs.value.shape[1:]
    key_width = inputs.key.shape[2]
    # Append K columns of zeros to the values, and start from a state that is zero in the columns of the values and the
    # identity in the appended ones. The appended columns of the output and of the final state are then linear maps.
    # They give the contribution of any initial state to the output and to the final state.
    identity = torch.eye(key_width, dtype=inputs.wide_dtype, device=inputs.value.device)
    identity = identity.expand(runs, heads, key_width, key_width)
    zeros = inputs.value.new_zeros(runs, heads, key_width, value_width, dtype=inputs.wide_dtype)
    padded = torch.cat([inputs.value, inputs.value.new_zeros(len(inputs.value), heads, key_width)], -1)
    out, effect = run_recurrence(replace(inputs, value=padded), lengths, torch.cat([zeros, identity], -1))
    out, reads = out.split([value_width, key_width], -1)
    return StatelessRuns(out=out, reads=reads.split(list(lengths)), decay=None, effect=effect)


def _linear_without_states(inputs: RecurrentInputs, lengths: Sequence[int]) -> StatelessRuns:
    """Compute `run_without_states` for linear attention with decay."""
    assert not inputs.is_unit, "only delta rules normalize queries and keys"
    out, states_after = run_recurrence(inputs, lengths)

    # The cumulative sum is computed for each run separately, because a sum over all runs would lose precision.
    decays = [decay.cumsum(0).exp() for decay in inputs.decay.to(inputs.wide_dtype).split(list(lengths))]
    if decays:
        run_decay = torch.stack([decay[-1] for decay in decays])
    else:
        run_decay = states_after.new_zeros(0, inputs.value.shape[1])
    factors = run_decay[..., None, None].expand(-1, -1, inputs.key.shape[2], 1)
    effect = torch.cat([states_after, factors], -1)
    reads = (inputs.query * inputs.scale).split(list(lengths))
    return StatelessRuns(out=out, reads=reads, decay=decays, effect=effect)


def advance(effect: torch.Tensor, state: torch.Tensor | None, value_width: int) -> torch.Tensor:
    """Return the state after a run, given the run's `effect` and the state before the run (None for zeros)."""
    written = effect[..., :value_width]
    transition = effect[..., value_width:]
    if state is None:
        return written
    is_factor = transition.shape[-1] == 1
    return written + (transition * state if is_factor else transition @ state)
