"""Head and loss chunk by chunk against full logits: time of forward and backward, and the most memory either holds.

    python benchmarks/linear_cross_entropy.py [--tokens 8192] [--vocabulary 152000] [--width 256] [--rounds 3]

Both run in turn, in an order that rotates. Memory is what operators allocate beyond inputs and gradients of inputs,
which both hold; it is counted at the dispatcher, so it is that of any device.
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
    """Bytes of all storages that operators made and that are still there: the most there ever were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
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
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    hidden = torch.randn(given.tokens, given.width, requires_grad=True)
    weight = (torch.randn(given.vocabulary, given.width) * given.width**-0.5).requires_grad_()
    targets = torch.randint(0, given.vocabulary, (given.tokens,))

    def full() -> torch.Tensor:
        return cross_entropy_sum(hidden @ weight.t(), targets)

    def chunked() -> torch.Tensor:
        return linear_cross_entropy_sum(hidden, LinearHead(weight), targets)

    ways = {"full logits": full, "chunked": chunked}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, int] = {}
    for number in range(given.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            hidden.grad = weight.grad = None
            begun = time.perf_counter()
            ways[name]().backward()
            seconds[name].append(time.perf_counter() - begun)
    gradients = hidden.nbytes + weight.nbytes
    for name, way in ways.items():
        hidden.grad = weight.grad = None
        with Peak() as peak:
            way().backward()
        peaks[name] = peak.most - gradients
    for name in ways:
        print(f"{name:12} {statistics.median(seconds[name]):7.2f} s, {peaks[name] / 2**20:9,.0f} MiB")
    times = statistics.median(seconds["chunked"]) / statistics.median(seconds["full logits"])
    print(f"chunked / full: time {times:.2f}, memory {peaks['chunked'] / peaks['full logits']:.3f}")


if __name__ == "__main__":
    main()
