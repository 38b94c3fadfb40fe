"""Measure the cost of a forward pass: the bytes that it keeps for backward, and the time that its operators take.

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

# FLOPs and bytes per second, roughly as on a current accelerator.
FLOPS = 5e14
BYTES = 2e12


class Meter(TorchDispatchMode):
    """Mode that measures a forward pass. Call `measure_kept_bytes` after it, while the output is still alive.

    Operators are not timed while `is_left_out()` is True. `is_expensive(func)` is True for operators that
    selective recomputation does not repeat.
    """

    def __init__(
        self, device: torch.device, is_expensive: Callable[[Any], bool], is_left_out: Callable[[], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = 0  # bytes kept for backward
        self.seconds = 0.0  # time of all operators
        self.cheap_seconds = 0.0  # time of operators for which `is_expensive` is False
        self._device = device
        self._is_expensive = is_expensive
        self._is_left_out = is_left_out
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls the operator again on its local tensors
        start = self._now()
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.device == self._device]
        is_planned = self._device.type == PLANNED
        seconds = estimate_seconds(func, args, tensors) if is_planned else self._now() - start
        if not self._is_left_out():
            self.seconds += seconds
            if not self._is_expensive(func):
                self.cheap_seconds += seconds

        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not x.is_meta]
        input_keys = {storage_key(x) for x in inputs}
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in input_keys:
                self._storages[key] = weakref.ref(tensor.untyped_storage())
        return out

    def measure_kept_bytes(self) -> None:
        """Set `kept` to the bytes of all tensors that are still alive. Freed gathered weights count as 0 bytes."""
        bytes_by_storage = {}
        for reference in self._storages.values():
            storage = reference()
            if storage is not None:
                bytes_by_storage[storage._cdata] = storage.nbytes()
        self.kept = sum(bytes_by_storage.values())

    def _now(self) -> float:
        """Return the time in seconds, after all work on the device has finished."""
        if self._device.type == PLANNED:
            return 0.0
        if not is_host(self._device):
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()


def estimate_seconds(func: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> float:
    """Estimate the seconds of an operator on an accelerator from the sizes of its tensors."""
    name = func.name()
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    num_bytes = sum(x.nbytes for x in (*tensors, *outputs))
    if func.is_view or not tensors:
        return 0.0
    flops = 0
    if "mm" in name and len(tensors) > 1:
        flops = 2 * math.prod(outputs[0].shape) * tensors[-2].shape[-1]
    elif "attention" in name and len(tensors) > 1:  # upper bound: causal attention over a pack with a single sample
        flops = 2 * tensors[0].numel() * (tensors[1].numel() // tensors[1].shape[-1])
    return flops / FLOPS + num_bytes / BYTES
