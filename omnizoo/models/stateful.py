"""Layers that carry a state along the sequence, in packs and across ranks: their own code, with our functions in it.

transformers' layers call a convolution and a recurrent rule by their names in the modeling file. `bind_states` gives
each such layer of one model a `forward` of the same code in which these names mean ours; other models never notice.
What tells samples apart comes through the model's keyword arguments, as it does for attention (models/attention.py).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from omnizoo.config.errors import UserError
from omnizoo.ops import recurrence, short_convolution
from omnizoo.ops.graphs import edge
from omnizoo.ops.recurrence import Steps

Door = Callable[..., Any]
# Keyword arguments that tell of a pack.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
TOLD = ("states", "attend", *BOUNDARIES)


class Pack(Protocol):
    """The tokens of a pack that are here, and how to reach those that are not."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def carry(self, steps: Steps) -> torch.Tensor: ...


@dataclass(frozen=True)
class Whole:
    """A pack with all its tokens on this rank."""

    lengths: Sequence[int]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        before = x.new_zeros(len(self.lengths), weight.shape[1] - 1, x.shape[1])
        return short_convolution.convolve(x, weight, bias, self.lengths, before)

    def carry(self, steps: Steps) -> torch.Tensor:
        return recurrence.carry(steps, self.lengths)[0]


def pack_of(module: nn.Module, given: Mapping[str, Any]) -> Pack | None:
    """The pack that a layer is at work on; None where there is none, as in generation."""
    told = given if any(given.get(name) is not None for name in TOLD) else getattr(module, "pack_carried", {})
    for name in ("states", "attend"):  # the latter if sequence parallel
        if told.get(name) is not None:
            pack: Pack = told[name]
            return pack
    boundaries = next((told[name] for name in BOUNDARIES if told.get(name) is not None), None)
    if boundaries is not None:
        return Whole(boundaries.diff().tolist())
    if module.training and torch.is_grad_enabled():
        raise UserError(
            f"model: {type(module).__name__} did not get the sample boundaries: its state would pass from one sample "
            "of a pack to the next"
        )
    return None


def convolution(module: nn.Module, original: Door) -> Door:
    """In place of `causal_conv1d_fn`: `hidden_states [1, C, T]`, `weight [C, K]`."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        pack = pack_of(module, kwargs)
        if pack is None:
            return original(hidden_states, weight, bias, activation, **kwargs)
        out = pack.convolve(hidden_states[0].T, weight, bias)
        return (out if activation is None else ACT2FN[activation](out)).T[None]

    return convolve


def gated_delta_rule(module: nn.Module, original: Door) -> Door:
    """In place of `torch_chunk_gated_delta_rule`: `query, key, value [1, T, H, ...]`, `g, beta [1, T, H]`."""

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        pack = pack_of(module, kwargs)
        if pack is None or initial_state is not None:
            kwargs |= {"initial_state": initial_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return original(query, key, value, g=g, beta=beta, **kwargs)
        scale = query.shape[-1] ** -0.5
        steps = Steps(query[0], key[0], value[0], g[0], beta[0], True, scale, use_qk_l2norm_in_kernel)
        return pack.carry(steps)[None], None

    return rule


def state_space(module: nn.Module, original: Door) -> Door:
    """In place of `mamba2_chunk_scan`: `hidden_states [1, T, H, V]`, `dt [1, T, H]`, `A, D [H]`, `B` (keys) and `C`
    (queries) `[1, T, G, K]`."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        chunk_size: int,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        z: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        pack = pack_of(module, kwargs)
        if pack is None or initial_states is not None or return_final_states:
            kwargs |= {"dt_bias": dt_bias, "initial_states": initial_states, "dt_softplus": dt_softplus}
            kwargs |= {"dt_limit": dt_limit, "return_final_states": return_final_states, "z": z}
            return original(hidden_states, dt, rate, keys, queries, chunk_size, **kwargs)
        assert z is None, "a gate inside of the scan, which no family has"
        # In fp32 at least, as the kernels for it do, whatever the precision of the tokens.
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        step = dt[0].to(wide) if dt_bias is None else dt[0].to(wide) + dt_bias.to(wide)
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        tokens, skip = hidden_states[0], kwargs.get("D")
        out = pack.carry(Steps(queries[0], keys[0], tokens, step * rate.to(wide), step, is_delta=False))
        if skip is not None:
            out = out + (skip.to(wide).unsqueeze(-1) * tokens.to(wide)).to(out.dtype)
        return out[None]

    return scan


def not_fused(module: nn.Module, original: Door) -> Door:
    """In place of `mamba2_split_conv1d_scan_combined`, which does convolution and scan at once, or says by None that it
    does not, and is followed by both."""
    return lambda *_, **__: None


# What modeling files call, and what is called instead.
DOORS: dict[str, Callable[[nn.Module, Door], Door]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,  # with a decay of its own for each channel
    "mamba2_split_conv1d_scan_combined": not_fused,
    "mamba2_chunk_scan": state_space,
}
# By the delta rule a token reads what is there, writes, and reads; otherwise it writes and reads.
PRODUCTS = {"torch_chunk_gated_delta_rule": 3, "chunk_kimi_delta_attention": 3, "mamba2_chunk_scan": 2}
# Rules of other layers with a state, for which there is nothing of ours yet.
UNKNOWN = {"mamba_selective_scan"}
BOUND = "_omnizoo_states"  # a mark: the names of a layer's doors


def has_states(model: nn.Module) -> bool:
    return any(BOUND in vars(module) for module in model.modules())


def state_products(model: nn.Module) -> list[int]:
    """Of each layer with a rule, how often a token is multiplied with a state or adds a product to one."""
    doors = [vars(module).get(BOUND, ()) for module in model.modules()]
    return [PRODUCTS[name] for names in doors for name in names if name in PRODUCTS]


def bind_states(model: nn.Module) -> int:
    """Let the layers of `model` that carry a state do so by our functions; how many these are."""
    bound = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        names = [name for name in DOORS if code is not None and name in code.co_names]
        if code is None or not names or UNKNOWN & {*code.co_names}:
            continue
        ours = {name: DOORS[name](module, forward.__globals__[name]) for name in names}
        own = FunctionType(
            code, {**forward.__globals__, **ours}, code.co_name, forward.__defaults__, forward.__closure__
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = edge(MethodType(own, module))  # of this instance alone
        vars(module)[BOUND] = tuple(names)
        bound += 1
    return bound
