"""The cost of a forward pass: the bytes it keeps for backward, and the time of its operators.

Time is measured on real devices. On the device of a dry run it is estimated from FLOPs and bytes, so that plans are
deterministic.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from omnizoo.ops.device import PLANNED, is_host
from omnizoo.ops.torch_private import TorchDispatchMode, storage_key, tree_leaves

FLOPS, BYTES = 5e14, 2e12  # per second, roughly those of a current accelerator


class Meter(TorchDispatchMode):
    """Mode that measures a forward pass. Call `settle` after it, while the output is still alive.

    Operators are not timed while `is_left_out()` is True. `is_expensive(func)` tells which ones selective recomputation
    does not repeat.
    """

    def __init__(
        self, device: torch.device, is_expensive: Callable[[Any], bool], is_left_out: Callable[[], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = 0  # bytes kept for backward
        self.seconds = 0.0  # time of all operators
        self.cheap_seconds = 0.0  # time of operators that are not `is_expensive`
        self._device, self._is_expensive, self._is_left_out = device, is_expensive, is_left_out
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls the operator again on its local tensors
        began = self._now()
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.device == self._device]
        seconds = figured(func, args, tensors) if self._device.type == PLANNED else self._now() - began
        if not self._is_left_out():
            self.seconds += seconds
            if not self._is_expensive(func):
                self.cheap_seconds += seconds
        given = {storage_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not x.is_meta}
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in given:
                self._made[key] = weakref.ref(tensor.untyped_storage())
        return out

    def settle(self) -> None:
        """Set `kept` to the bytes of all tensors that are still alive. Freed gathered weights have a size of 0."""
        alive = {storage._cdata: storage.nbytes() for ref in self._made.values() if (storage := ref()) is not None}
        self.kept = sum(alive.values())

    def _now(self) -> float:
        if self._device.type == PLANNED:
            return 0.0
        if not is_host(self._device):
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()


def figured(func: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> float:
    """Estimate the seconds of an operator on an accelerator from the sizes of its tensors."""
    name, tensors = func.name(), [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    moved = sum(x.nbytes for x in (*tensors, *outputs))
    if func.is_view or not tensors:
        return 0.0
    flops = 0
    if "mm" in name and len(tensors) > 1:
        flops = 2 * math.prod(outputs[0].shape) * tensors[-2].shape[-1]
    elif "attention" in name and len(tensors) > 1:  # causal, as if the pack were a single sample: an upper bound
        flops = 2 * tensors[0].numel() * (tensors[1].numel() // tensors[1].shape[-1])
    return flops / FLOPS + moved / BYTES
