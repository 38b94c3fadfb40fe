"""Compare two kernels for packed attention on the CPU, forward and backward: one call per sample, and blocks.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Prints CPU milliseconds (best of 7 interleaved rounds) and the largest relative difference of outputs and gradients.
"""

import random
import time
from collections.abc import Callable, Sequence

import torch

from omnizoo.ops.attention.packed import Boundaries, Pattern, _in_blocks, per_sample

Kernel = Callable[..., torch.Tensor]


def measure(name: str, lengths: Sequence[int], kv_heads: int = 2, key_width: int = 64, **pattern: object) -> None:
    """Time both kernels on a pack of samples with these lengths, and print a line."""
    heads, width, tokens = 8, 64, sum(lengths)
    shapes = ((heads, key_width), (kv_heads, key_width), (kv_heads, width))
    inputs = [torch.randn(1, tokens, h, d).transpose(1, 2).requires_grad_() for h, d in shapes]
    boundaries = Boundaries(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    grad = torch.randn(1, tokens, heads * width)
    attention_pattern = Pattern(**pattern)
    differentiable = inputs if attention_pattern.sinks is None else [*inputs, attention_pattern.sinks]

    def run(kernel: Kernel) -> tuple[float, list[torch.Tensor]]:
        start = time.thread_time()
        out = kernel(*inputs, boundaries, attention_pattern).reshape(1, tokens, -1)
        gradients = torch.autograd.grad(out, differentiable, grad)
        return time.thread_time() - start, [out.detach(), *gradients]

    seconds: dict[str, list[float]] = {"per sample": [], "blocks": []}
    results: dict[str, list[torch.Tensor]] = {}
    for _ in range(7):
        for label, kernel in (("per sample", per_sample), ("blocks", _in_blocks)):
            elapsed, results[label] = run(kernel)
            seconds[label].append(elapsed)
    pairs = zip(results["blocks"], results["per sample"], strict=True)
    difference = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    best = "  ".join(f"{label} {min(times) * 1e3:7.1f} ms" for label, times in seconds.items())
    print(f"{name:28s}{best}   difference {difference:.0e}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = random.Random(1)
    measure("8 x 512", [512] * 8, kv_heads=8)
    measure("8 x 512, 2 kv heads", [512] * 8)
    measure("lognormal", [min(900, max(8, int(generator.lognormvariate(5, 0.8)))) for _ in range(20)])
    measure("128 x 16", [16] * 128)
    measure("2 x 1024, window 128", [1024] * 2, window=128)
    measure("2 x 1024, sinks", [1024] * 2, sinks=torch.randn(8).requires_grad_())
    measure("2 x 1024, keys 96 wide", [1024] * 2, kv_heads=8, key_width=96)
    measure("2 x 1024, softcap", [1024] * 2, softcap=30.0)
