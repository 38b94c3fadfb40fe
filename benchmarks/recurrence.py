"""Compare recurrences in plain torch, forward and backward: ours, and the functions of transformers.

    python benchmarks/recurrence.py [--tokens 1024] [--heads 8] [--width 64] [--rounds 3]

Prints CPU seconds on one thread, best of several rounds, so that other work on the machine hardly matters.
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from omnizoo.ops.linear_attention.recurrence import RecurrentInputs, run_recurrence


def seconds(run: Callable[[], torch.Tensor], rounds: int) -> float:
    """Return the least CPU seconds of forward and backward."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run().sum().backward()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 1024), ("heads", 8), ("width", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.tokens, args.heads, args.width)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    decay, beta = ((sign * torch.rand(shape[:2])).requires_grad_() for sign in (-1, 1))
    rate, unit, scale = -torch.rand(args.heads), {"use_qk_l2norm_in_kernel": True}, args.width**-0.5
    delta = RecurrentInputs(q, k, v, decay, beta, is_delta=True, scale=scale, is_unit=True)
    query, key, value = (x[None] for x in (q, k, v))
    runs: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
        "gated delta rule": (
            lambda: run_recurrence(delta, [args.tokens])[0],
            lambda: qwen3_5.torch_chunk_gated_delta_rule(query, key, value, g=decay[None], beta=beta[None], **unit)[0],
        ),
        "Mamba-2": (
            lambda: run_recurrence(RecurrentInputs(q, k, v, beta * rate, beta, is_delta=False), [args.tokens])[0],
            lambda: mamba2.mamba2_chunk_scan(value, beta[None], rate, key, query, chunk_size=64),
        ),
    }
    for name, (ours, theirs) in runs.items():
        print(f"{name}: {seconds(ours, args.rounds):.3f} s, transformers' {seconds(theirs, args.rounds):.3f} s")


if __name__ == "__main__":
    main()
