"""Compare head and loss in chunks with full logits: time of forward and backward, and peak memory.

    python benchmarks/linear_cross_entropy.py [--tokens 8192] [--vocabulary 152000] [--width 256] [--rounds 3]

Both run in turn, in alternating order. Memory is what operators allocate, without inputs and their gradients. It is
counted at the dispatcher, so it is the same on every device.
"""

import argparse
import statistics
import time
import weakref
from typing import Any

import torch

from omnizoo.ops.loss.cross_entropy import cross_entropy_sum
from omnizoo.ops.loss.linear_cross_entropy import LinearHead, linear_cross_entropy_sum
from omnizoo.ops.torch_private import TorchDispatchMode, tree_leaves


class Peak(TorchDispatchMode):
    """Counts the bytes of live storages that operators have allocated, and their maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="number of tokens (default: 8192)")
    parser.add_argument("--vocabulary", type=int, default=152_000, help="size of the vocabulary (default: 152000)")
    parser.add_argument("--width", type=int, default=256, help="width of hidden states (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="number of timed rounds (default: 3)")
    args = parser.parse_args()
    hidden = torch.randn(args.tokens, args.width, requires_grad=True)
    weight = (torch.randn(args.vocabulary, args.width) * args.width**-0.5).requires_grad_()
    targets = torch.randint(0, args.vocabulary, (args.tokens,))

    def full() -> torch.Tensor:
        return cross_entropy_sum(hidden @ weight.t(), targets)

    def chunked() -> torch.Tensor:
        return linear_cross_entropy_sum(hidden, LinearHead(weight), targets)

    methods = {"full logits": full, "chunked": chunked}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    peaks: dict[str, int] = {}
    for number in range(args.rounds):
        for name in sorted(methods, reverse=bool(number % 2)):
            hidden.grad = weight.grad = None
            start = time.perf_counter()
            methods[name]().backward()
            seconds[name].append(time.perf_counter() - start)
    gradients = hidden.nbytes + weight.nbytes
    for name, method in methods.items():
        hidden.grad = weight.grad = None
        with Peak() as peak:
            method().backward()
        peaks[name] = peak.most - gradients
    for name in methods:
        print(f"{name:12} {statistics.median(seconds[name]):7.2f} s, {peaks[name] / 2**20:9,.0f} MiB")
    times = statistics.median(seconds["chunked"]) / statistics.median(seconds["full logits"])
    print(f"chunked / full: time {times:.2f}, memory {peaks['chunked'] / peaks['full logits']:.3f}")


if __name__ == "__main__":
    main()
