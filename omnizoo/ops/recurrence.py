"""A state that tokens carry along their sample: what each of them does to it, by which kernel, and runs of tokens whose
states before are not known yet (parallel/states.py joins them).

`carry` picks the kernel for the device (ops/state_kernels.py); `chunked_rules` has the plain torch twins that kernels
are tested against.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from omnizoo.ops.chunked_rules import delta_rule, linear_rule
from omnizoo.ops.state_kernels import rule_kernel


@dataclass(frozen=True)
class Steps:
    """What tokens do to the state `S [K, V]` of a head, one after the other: S <- exp(decay) S, then write, then read
    `scale q S`. What is written under the key is `beta v`, or, by the delta rule, `beta (v - k S)`."""

    query: torch.Tensor  # [T, G, K]; G divides H: heads in a row share a query and a key
    key: torch.Tensor  # [T, G, K]
    value: torch.Tensor  # [T, H, V]
    decay: torch.Tensor  # [T, H], or [T, H, K] of each channel by itself (delta rule only); not above 0
    beta: torch.Tensor  # [T, H]
    is_delta: bool
    scale: float = 1.0
    is_unit: bool = False  # queries and keys are brought to length 1

    @property
    def wide(self) -> torch.dtype:
        """Of states, decays and betas, whatever the precision of the rest."""
        return torch.promote_types(self.value.dtype, torch.float32)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Steps":
        """The same change to every tensor."""
        return replace(
            self,
            query=change(self.query),
            key=change(self.key),
            value=change(self.value),
            decay=change(self.decay),
            beta=change(self.beta),
        )


def carry(steps: Steps, lengths: Sequence[int], state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tokens of runs of these lengths read, `[T, H, V]`, and the states after each run; `state [N, H, K, V]`
    is that before each, None for zeros. States are in fp32 at least."""
    kernel = rule_kernel(steps.value, steps.key.shape[2], steps.is_delta, steps.decay.dim() == 3)
    if kernel is not None and len(steps.value):
        return _by_kernel(kernel, steps, lengths, state)
    wide = steps.wide
    query, key, value, decay, beta = (
        x.to(wide) for x in (steps.query, steps.key, steps.value, steps.decay, steps.beta)
    )
    if steps.is_unit:
        query, key = _unit(query), _unit(key)
    if steps.is_delta:
        query, key = (_to_heads(x, value.shape[1]) for x in (query, key))
    rule = delta_rule if steps.is_delta else linear_rule
    out, after = rule(query * steps.scale, key, value, decay, beta, lengths, state)
    return out.to(steps.value.dtype), after


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _to_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, G, ...] -> [T, H, ...]"""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _by_kernel(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    steps: Steps,
    lengths: Sequence[int],
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch for all runs. Queries, keys and values stay in their 16 bits, decays and states in fp32."""
    wide, narrow = steps.wide, steps.value.dtype
    query, key = (x.to(wide) for x in (steps.query, steps.key))
    if steps.is_unit:
        query, key = _unit(query), _unit(key)
    query, key = (_to_heads(x.to(narrow), steps.value.shape[1]) for x in (query, key))
    value, decay, beta = steps.value, steps.decay.to(wide), steps.beta.to(wide)
    if not steps.is_delta:
        value = (value.to(wide) * beta.unsqueeze(-1)).to(narrow)
    given = (query, key, value, decay, beta) if steps.is_delta else (query, key, value, decay)
    return kernel(*given, lengths=lengths, scale=steps.scale, state=state)


@dataclass(frozen=True)
class Apart:
    """Runs that were worked on as if no state came before them, and what one would have added."""

    out: torch.Tensor  # [T, H, V]
    reads: Sequence[torch.Tensor]  # of each run [L, H or G, K]: what each token reads any state before it with
    left: Sequence[torch.Tensor] | None  # [L, H]: how much of that state is left there; None: it is part of `reads`
    effect: torch.Tensor  # [N, H, K, V + K or V + 1], of each run: what it writes, and what it does to a state before

    def added(self, run: int, state: torch.Tensor) -> torch.Tensor:
        """What a state `[H, K, V]` adds to the output of a run, `[L, H, V]`."""
        reads = self.reads[run].transpose(0, 1)  # [H or G, L, K]
        by_group = state.to(reads.dtype).reshape(len(reads), len(state) // len(reads), *state.shape[1:])
        read = (reads.unsqueeze(1) @ by_group).flatten(0, 1).transpose(0, 1)
        return read if self.left is None else (read * self.left[run].unsqueeze(-1)).to(reads.dtype)


def apart(steps: Steps, lengths: Sequence[int]) -> Apart:
    runs, heads, wide = len(lengths), *steps.value.shape[1:]
    deep = steps.key.shape[2]
    if not steps.is_delta:
        assert not steps.is_unit, "which only delta rules have"
        out, after = carry(steps, lengths)
        # Run by run: over all of them, the sum would lose its digits.
        left = [decay.cumsum(0).exp() for decay in steps.decay.to(steps.wide).split(list(lengths))]
        kept = torch.stack([each[-1] for each in left]) if left else after.new_zeros(0, heads)
        effect = torch.cat([after, kept[..., None, None].expand(-1, -1, deep, 1)], -1)
        return Apart(out, (steps.query * steps.scale).split(list(lengths)), left, effect)
    # Next to the values, as many columns as the state has rows, which nothing is written to; and a state that is zero
    # for the values and the identity for those: what comes out there is what any state before would give.
    identity = torch.eye(deep, dtype=steps.wide, device=steps.value.device).expand(runs, heads, deep, deep)
    nothing = steps.value.new_zeros(runs, heads, deep, wide, dtype=steps.wide)
    padded = torch.cat([steps.value, steps.value.new_zeros(len(steps.value), heads, deep)], -1)
    out, effect = carry(replace(steps, value=padded), lengths, torch.cat([nothing, identity], -1))
    out, reads = out.split([wide, deep], -1)
    return Apart(out, reads.split(list(lengths)), None, effect)


def advance(effect: torch.Tensor, state: torch.Tensor | None, wide: int) -> torch.Tensor:
    """The state after a run, by its effect and the state before (None: zeros); `wide` is that of a value."""
    written, moved = effect[..., :wide], effect[..., wide:]
    if state is None:
        return written
    return written + (moved * state if moved.shape[-1] == 1 else moved @ state)
