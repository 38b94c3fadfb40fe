"""Optional kernels for recurrent layers: `fla` (flash-linear-attention 0.5 or later) and `causal_conv1d`.

If the device does not support them, or the package is not installed, the functions return None and the caller uses
plain torch. The same holds for `train.deterministic`: the kernels of `fla` are selected by measured times, and
`causal_conv1d` adds gradients atomically.

A kernel computes all runs at once, given their lengths and the state before each run. The tests do not run the real
kernels. They check the selection with stand-ins, and the arguments of the calls follow the documentation of the
packages.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch

from omnizoo.ops.determinism import is_deterministic
from omnizoo.ops.device import has_triton, to_device

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
MAX_KEY_WIDTH = 256  # largest width of keys that the kernels support
TAPS = (2, 3, 4)  # filter lengths that the convolution kernel supports
RULES = {  # keys: (is the delta rule, has one decay per channel)
    (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("fla.ops.kda", "chunk_kda"),
    (False, False): ("fla.ops.simple_gla", "chunk_simple_gla"),
}
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def rule_kernel(value: torch.Tensor, key_width: int, is_delta: bool, by_channel: bool) -> Kernel | None:
    """Return a kernel with the signature of `_rule` for states with `key_width` rows, or None to use plain torch."""
    if not has_triton(value.device) or value.dtype not in HALF or key_width > MAX_KEY_WIDTH:
        return None
    module, name = RULES[is_delta, by_channel]
    kernel = None if _is_refused(module) else find_kernel(module, name, "recurrent layers")
    return None if kernel is None else partial(_rule, kernel)


def convolution_kernel(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return a causal convolution kernel, or None to use plain torch.

    Its signature is `(x [1, channels, tokens], weight [channels, taps], bias) -> [1, channels, tokens]`, with the
    channels of `x` contiguous in memory.
    """
    if not has_triton(x.device) or weight.shape[1] not in TAPS or x.shape[1] % 8:
        return None
    if _is_refused("causal_conv1d"):
        return None
    kernel: Callable[..., torch.Tensor] | None = find_kernel("causal_conv1d", "causal_conv1d_fn", "short convolutions")
    return kernel


def _is_refused(module: str) -> bool:
    """Whether the kernels of `module` must not be used, because their results differ between runs."""
    if is_deterministic():
        _log_refusal(module.partition(".")[0])
        return True
    return False


@lru_cache
def _log_refusal(package: str) -> None:
    """Log, once per package, that its kernels are not used although it is installed."""
    if find_spec(package) is not None:
        log.info("train.deterministic: %s is not used, because its results differ between runs", package)


@lru_cache
def find_kernel(module: str, name: str, layers: str) -> Any:
    """Return the function `name` of `module`, or None if the module is not installed. Log the choice once.

    `layers` describes the layers in the log line.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        log.info("%s use plain torch. Install %s for faster kernels.", layers, package)
        return None
    log.info("%s use %s.%s", layers, module, name)
    return getattr(import_module(module), name)


def _rule(
    kernel: Any, *inputs: torch.Tensor, lengths: Sequence[int], scale: float, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a kernel of `fla`. `inputs` are query, key, value, decay and, for the delta rule, beta: `[T, H, ...]`."""
    bounds = torch.tensor([0, *accumulate(lengths)])
    out, after = kernel(
        *(x.unsqueeze(0) for x in inputs),
        scale=scale,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=to_device(bounds, inputs[0].device),
        cu_seqlens_cpu=bounds,  # without a copy on the CPU, the kernel would cause a host sync
    )
    return out.squeeze(0), after
