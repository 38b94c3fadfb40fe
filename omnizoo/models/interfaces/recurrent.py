"""Run recurrent layers on packs and across ranks. The code of each layer is unchanged, but it calls our functions.

Layers of transformers call a convolution and a recurrence by global names of the modeling file. `bind_states` gives
each such layer of a model a `forward` with the same code, in which these names refer to our functions. Other models are
unaffected. Sample boundaries are passed as keyword arguments, as for attention (models/interfaces/attention.py).
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
from omnizoo.ops.compiled_blocks import graph_break
from omnizoo.ops.linear_attention import recurrence, short_convolution
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs

Rule = Callable[..., Any]
# Keyword arguments that describe a pack.
BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens")
PACK_ARGUMENTS = ("states", "attend", *BOUNDARIES)


class PackContext(Protocol):
    """The tokens of a pack on this rank, and communication with the ranks that have the other tokens of the pack."""

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def run_recurrence(self, inputs: RecurrentInputs) -> torch.Tensor: ...


@dataclass(frozen=True)
class LocalPack:
    """A pack with all its tokens on this rank."""

    lengths: Sequence[int]

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        before = x.new_zeros(len(self.lengths), weight.shape[1] - 1, x.shape[1])
        return short_convolution.convolve(x, weight, bias, self.lengths, before)

    def run_recurrence(self, inputs: RecurrentInputs) -> torch.Tensor:
        return recurrence.run_recurrence(inputs, self.lengths)[0]


def pack_of(module: nn.Module, kwargs: Mapping[str, Any]) -> PackContext | None:
    """Return the pack that a layer runs on, or None if it does not run on a pack, as in generation.

    `kwargs` are the keyword arguments of the replaced function.
    """
    has_pack = any(kwargs.get(name) is not None for name in PACK_ARGUMENTS)
    arguments = kwargs if has_pack else getattr(module, "pack_carried", {})

    for name in ("states", "attend"):  # "attend": sequence parallel
        if arguments.get(name) is not None:
            pack: PackContext = arguments[name]
            return pack
    for name in BOUNDARIES:
        if arguments.get(name) is not None:
            return LocalPack(arguments[name].diff().tolist())

    if module.training and torch.is_grad_enabled():
        raise UserError(
            f"model: {type(module).__name__} did not receive the sample boundaries, so its state cannot be reset "
            "between the samples of a pack. Pass the keyword arguments of forward on, or use another model."
        )
    return None


def convolution(module: nn.Module, original: Rule) -> Rule:
    """Return a replacement of `causal_conv1d_fn`: `hidden_states [1, channels, tokens]`, `weight [channels, taps]`."""

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
        if activation is not None:
            out = ACT2FN[activation](out)
        return out.T[None]

    return convolve


def gated_delta_rule(module: nn.Module, original: Rule) -> Rule:
    """Return a replacement of `torch_chunk_gated_delta_rule`.

    Shapes: `query, key, value [1, tokens, heads, ...]`, `g, beta [1, tokens, heads]`.
    """

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        pack = pack_of(module, kwargs)
        if pack is None or kwargs.get("initial_state") is not None:
            return original(query, key, value, **kwargs)
        g, beta = kwargs["g"][0], kwargs["beta"][0]
        is_normed = kwargs.get("use_qk_l2norm_in_kernel", False)
        steps = RecurrentInputs(query[0], key[0], value[0], g, beta, True, query.shape[-1] ** -0.5, is_normed)
        return pack.run_recurrence(steps)[None], None

    return rule


def state_space(module: nn.Module, original: Rule) -> Rule:
    """Return a replacement of `mamba2_chunk_scan`.

    Shapes: `hidden_states [1, T, H, V]`, `dt [1, T, H]`, `A, D [H]`, `B` (keys) and `C` (queries) `[1, T, G, K]`, for T
        tokens, H heads, G groups of heads, and widths K of keys and V of values.
    """

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        rate: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        pack = pack_of(module, kwargs)
        if pack is None or kwargs.get("initial_states") is not None or kwargs.get("return_final_states"):
            return original(hidden_states, dt, rate, keys, queries, **kwargs)
        assert kwargs.get("z") is None, "no supported family has a gate inside the scan"

        # At least fp32, as in the fused kernels, regardless of the precision of the tokens.
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        tokens = hidden_states[0]
        step_size = dt[0].to(dtype)
        bias = kwargs.get("dt_bias")
        if bias is not None:
            step_size = step_size + bias.to(dtype)
        if kwargs.get("dt_softplus"):
            step_size = F.softplus(step_size)
        low, high = kwargs.get("dt_limit", (0.0, float("inf")))
        step_size = step_size.clamp(low, high)

        decay = step_size * rate.to(dtype)
        out = pack.run_recurrence(RecurrentInputs(queries[0], keys[0], tokens, decay, step_size, is_delta=False))
        skip = kwargs.get("D")
        if skip is not None:
            out = out + (skip.to(dtype).unsqueeze(-1) * tokens.to(dtype)).to(out.dtype)
        return out[None]

    return scan


def not_fused(module: nn.Module, original: Rule) -> Rule:
    """Return a replacement of the fused function `mamba2_split_conv1d_scan_combined`.

    The replacement returns None, so the layer calls convolution and scan separately.
    """
    return lambda *_, **__: None


# Functions that modeling files call, and the factories of their replacements.
REPLACEMENTS: dict[str, Callable[[nn.Module, Rule], Rule]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,  # has a separate decay for each channel
    "mamba2_split_conv1d_scan_combined": not_fused,
    "mamba2_chunk_scan": state_space,
}
# Number of multiplications with the state per token. The delta rule has three: it reads, writes and reads again. Other
# rules have two: they write and read.
PRODUCTS = {"torch_chunk_gated_delta_rule": 3, "chunk_kimi_delta_attention": 3, "mamba2_chunk_scan": 2}
# Recurrences that have no replacement yet.
UNKNOWN = {"mamba_selective_scan"}
BOUND = "_omnizoo_states"  # attribute of a layer: names of the functions that were replaced


def has_states(model: nn.Module) -> bool:
    """Whether `bind_states` replaced functions in any layer of `model`."""
    return any(BOUND in vars(module) for module in model.modules())


def state_products(model: nn.Module) -> list[int]:
    """Return the number of multiplications with the state per token, for each recurrent layer."""
    bound_names = [vars(module).get(BOUND, ()) for module in model.modules()]
    return [PRODUCTS[name] for names in bound_names for name in names if name in PRODUCTS]


def bind_states(model: nn.Module) -> int:
    """Replace the functions in recurrent layers of `model`. Return the number of layers."""
    num_bound = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        names = [name for name in REPLACEMENTS if code is not None and name in code.co_names]
        if code is None or not names or UNKNOWN & {*code.co_names}:
            continue
        replacements = {name: REPLACEMENTS[name](module, forward.__globals__[name]) for name in names}
        global_names = {**forward.__globals__, **replacements}
        rebound = FunctionType(code, global_names, code.co_name, forward.__defaults__, forward.__closure__)
        rebound.__kwdefaults__ = forward.__kwdefaults__
        module.forward = graph_break(MethodType(rebound, module))  # replaces `forward` of this instance only
        vars(module)[BOUND] = tuple(names)
        num_bound += 1
    return num_bound
