"""Kernels for layers with a state, where the device and what is installed have them: `fla` (flash-linear-attention, 0.5
or later) for the rules, `causal_conv1d` for convolutions. Elsewhere None, which means plain torch.

Each takes all runs at once, by their lengths and with a state before each. Neither has run on this code's tests: the
choice is tested with stand-ins, the calls are those of the packages' own documentation.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

from omnizoo.ops.device import has_triton, to_device

HALF = (torch.bfloat16, torch.float16)
DEEPEST = 256  # rows of a state that the kernels take
TAPS = (2, 3, 4)  # of a convolution
RULES = {  # by whether it is the delta rule, and whether channels decay by themselves
    (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
}
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def rule_kernel(value: torch.Tensor, deep: int, is_delta: bool, by_channel: bool) -> Kernel | None:
    """What carries a state of `deep` rows along runs of tokens, called as `_rule` is."""
    if not has_triton(value.device) or value.dtype not in HALF or deep > DEEPEST:
        return None
    found = find(*RULES[is_delta, by_channel], "a layer's state")
    return None if found is None else partial(_rule, found)


def convolution_kernel(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """`(x [1, C, T], weight [C, K], bias) -> [1, C, T]`, causal, channels next to each other in memory."""
    if not has_triton(x.device) or weight.shape[1] not in TAPS or x.shape[1] % 8:
        return None
    found: Callable[..., torch.Tensor] | None = find("causal_conv1d", "causal_conv1d_fn", "short convolutions")
    return found


@lru_cache
def find(module: str, name: str, what: str) -> Any:
    """The function, if it is installed; says once which one does the work."""
    say = logging.getLogger(__name__).info
    if find_spec(module.partition(".")[0]) is None:
        say("%s: plain torch; install %s for its kernels", what, module.partition(".")[0])
        return None
    say("%s: %s.%s", what, module, name)
    return getattr(import_module(module), name)


def _rule(
    kernel: Any, *given: torch.Tensor, lengths: Sequence[int], scale: float, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`given [T, H, ...]`: query, key, value, decay, and for the delta rule beta."""
    bounds = torch.tensor([0, *accumulate(lengths)])
    out, after = kernel(
        *(x.unsqueeze(0) for x in given),
        scale=scale,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=to_device(bounds, given[0].device),
        cu_seqlens_cpu=bounds,  # or the kernel would ask the device for them
    )
    return out.squeeze(0), after
