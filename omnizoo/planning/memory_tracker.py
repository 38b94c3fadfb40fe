"""Track the memory of a step: each allocation and release, with its part (such as weights or activations) and module.

A dispatch mode records when an operator allocates a tensor and when its storage is freed. It counts the memory that
tensors request from the allocator, without workspaces of kernels and fragmentation.
"""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omnizoo.ops.torch_private import (
    DEVICE_OF,
    TorchDispatchMode,
    is_fake,
    replaced,
    tree_leaves,
    within_fsdp,
    within_shard_propagation,
)
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.fsdp.sharded_tensors import local_shard
from omnizoo.parallel.traffic_tag import sent_along, tagged_axes
from omnizoo.planning.op_counter import OpCounter

WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED = "weights", "gradients", "optimizer", "gathered weights"
ACTIVATIONS, LOGITS, EXCHANGE, OTHER = "activations", "logits", "exchange buffers", "other"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, EXCHANGE, OTHER)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# The part of allocations that FSDP2 makes, by kind of work.
FSDP_PARTS = {"gather": GATHERED, "reduce": EXCHANGE, "accumulate": GRADIENTS}
ALIGNED = 512  # bytes; allocators of accelerators round sizes up to a multiple of this


@dataclass(eq=False)
class Allocation:
    """A tensor storage that has been allocated."""

    bytes: int
    part: str  # one of PARTS
    module: str  # module that allocated it
    phase: str  # phase in which it was allocated


@dataclass(frozen=True)
class Peak:
    """The moment of a step with the most memory."""

    bytes: int
    parts: dict[str, int]  # bytes by part
    activations: dict[str, int]  # bytes of activations by module, summed over all layers (`model.layers.*.mlp`)
    module: str  # module that is running at the peak
    phase: str


@dataclass(frozen=True)
class Timeline:
    """Memory by part, at the start of a step and after each allocation or release."""

    bytes: npt.NDArray[np.int64]  # [parts, events + 1]
    phases: list[tuple[int, str]]  # (index of the first event, phase)


class MemoryTracker(TorchDispatchMode):
    """Dispatch mode that records memory, collectives and operators of a dry run.

    Run everything inside `watching()`, wrap the steps in `following(model, optimizer)`, and call `begin_step` before
    each step.
    """

    def __init__(self, device: torch.device, rounded: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.rounded = device, rounded
        self.vocabulary = 0  # width of logits; tensors with this width count as logits
        self.phase = BACKWARD
        self._modules: list[str] = []  # stack of modules whose forward pass is running
        self._backward_module = ""  # module whose backward pass is running
        self._blocks: dict[int, Allocation] = {}  # live allocations, keyed by storage
        self._muted = False  # whether operators are ignored
        self._fsdp_part: str | None = None  # part of allocations while FSDP2 is working, otherwise None
        self.see_on_host: Callable[[torch.Tensor], None] = lambda _: None  # called with fake tensors on the CPU
        self.begin_step()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the operator again on its local tensors
        if self.traffic is not None:  # counted here, because another dispatch mode for this would cost as much time
            self.traffic.count(func, args)
        result = func(*args, **(kwargs or {}))
        if not self._muted:
            self.work.see(func, args, kind_of(self.module), self.phase, result, kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor, part: str | None = None) -> None:
        """Record the storage of `tensor` if it is new, and track its release. `part` overrides the inferred part."""
        local = local_shard(tensor)
        if tensor.device != self.device:
            if is_fake(local) and tensor.device.type == "cpu":
                self.see_on_host(local)
            return
        storage = local.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = Allocation(0, part or self._part(local), self.module, self.phase)
            self._blocks[key] = block
            weakref.finalize(storage, self._end, key)
            self._set(block, storage.nbytes())
        elif part is not None:
            block.part = part

    @property
    def module(self) -> str:
        """The module whose forward or backward pass is running."""
        return self._modules[-1] if self._modules else self._backward_module

    def begin_step(self, traffic: CollectiveCounter | None = None) -> None:
        """Start a new step: clear all records except live allocations. `traffic` counts the collectives of the step."""
        self.traffic, self.work = traffic, OpCounter(self.device)
        self._marks: list[tuple[int, str]] = []
        with _garbage_collection_paused():  # both lists must describe the same moment
            self._base = [(block, block.bytes, "") for block in self._blocks.values()]
            self._events: list[tuple[Allocation, int, str]] = []

    def end_step(self, model: nn.Module) -> None:
        """End the step: classify the memory of the parameters' `.grad` tensors as gradients."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.see(parameter.grad, GRADIENTS)

    def peak(self) -> Peak:
        """Return the moment of the step with the most memory."""
        levels = self.timeline().bytes
        num_events = int(levels.sum(0).argmax())  # number of events up to the peak
        module = self._events[num_events - 1][2] if num_events else ""
        phases = [FORWARD, *(name for first, name in self._marks if first < max(1, num_events))]
        activations: Counter[str] = Counter()
        for block, delta, _ in [*self._base, *self._events[:num_events]]:
            if block.part == ACTIVATIONS:
                activations[kind_of(block.module)] += delta
        parts = dict(zip(PARTS, levels[:, num_events].tolist(), strict=True))
        return Peak(
            bytes=sum(parts.values()),
            parts=parts,
            activations={name: size for name, size in activations.most_common() if size},
            module=module,
            phase=phases[-1],
        )

    def timeline(self) -> Timeline:
        """Return the memory of each part during the step."""
        events = list(self._events)  # copied, because garbage collection may free tensors and thereby add events
        changes = np.zeros((len(PARTS), len(events) + 1), np.int64)
        for block, size, _ in self._base:
            changes[PARTS.index(block.part), 0] += size
        for i, (block, delta, _) in enumerate(events, start=1):
            changes[PARTS.index(block.part), i] += delta
        return Timeline(changes.cumsum(1), list(self._marks))

    def muted(self) -> AbstractContextManager[None]:
        """Return a context manager in which operators are not counted."""
        return replaced((self, "_muted", True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: record the allocations of every operator, and every resize of a storage."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                if block.part != OPTIMIZER:  # CPU offload resizes optimizer state
                    block.part = GATHERED  # apart from offload, only FSDP resizes storages
                self._set(block, size)
            return result

        replacements = [
            (torch.UntypedStorage, "resize_", resized),
            *within_shard_propagation(DTensor, self.muted),
            *within_fsdp(self._within_fsdp),
        ]
        with replaced(*replacements), self:
            yield

    @contextmanager
    def _within_fsdp(self, work: str, axes: Sequence[str]) -> Iterator[None]:
        """Context manager: attribute allocations to a kind of work in FSDP2, and collectives to these mesh axes."""
        with replaced((self, "_fsdp_part", FSDP_PARTS[work])), sent_along(*axes):
            yield

    @contextmanager
    def following(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager: track the running module and phase, and count the tensors of `model` as weights."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.see(tensor, WEIGHTS)
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
                stack.enter_context(module.register_forward_hook(partial(self._leave, name)))
            stack.enter_context(optimizer.register_step_pre_hook(lambda *_: self._turn(UPDATE)))
            yield

    def _enter(self, name: str, *_: object) -> None:
        """Hook for the start of a module's forward pass. The name of the model itself is empty."""
        if not name:
            self._keep_gradients()
            self._turn(FORWARD)
            self._backward_module = ""
        # Recomputation ends early with an exception, so `_leave` is not called for its modules. Remove the modules on
        # the stack that do not contain this module.
        while self._modules and not name.startswith(self._modules[-1] and self._modules[-1] + "."):
            self._modules.pop()
        self._modules.append(name)

    def _leave(self, name: str, module: nn.Module, args: object, out: object) -> None:
        """Hook for the end of a module's forward pass. It adds hooks for the start of the module's backward pass."""

        def enter_backward(_: torch.Tensor) -> None:
            self._turn(BACKWARD)
            self._modules.clear()
            self._backward_module = name

        while self._modules and self._modules.pop() != name:
            pass
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(enter_backward)

    def _turn(self, phase: str) -> None:
        """Change the phase and record where the new phase begins."""
        if phase != self.phase:
            if phase == UPDATE:
                self._keep_gradients()
                self._backward_module = ""
            self.phase = phase
            self._marks.append((len(self._events), phase))

    def _keep_gradients(self) -> None:
        """Count the allocations that were made in the backward pass and are still alive as gradients."""
        for block in list(self._blocks.values()):
            if block.phase == BACKWARD and block.part in (OTHER, EXCHANGE, ACTIVATIONS):
                block.part = GRADIENTS

    def _set(self, block: Allocation, size: int) -> None:
        """Set the size of an allocation and record the event. With `rounded`, the size is rounded up."""
        if self.rounded:
            size += -size % ALIGNED
        if size != block.bytes:
            self._events.append((block, size - block.bytes, self.module))
            block.bytes = size

    def _end(self, key: int) -> None:
        """Record the release of a storage."""
        self._set(self._blocks.pop(key), 0)

    def _part(self, tensor: torch.Tensor) -> str:
        """Infer the part of a new allocation from the phase, its shape and the running code."""
        if self.phase == UPDATE:
            return OPTIMIZER
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return LOGITS
        if self._fsdp_part is not None:
            return self._fsdp_part
        if tagged_axes():
            return EXCHANGE
        return ACTIVATIONS if self._modules or self.phase == FORWARD else OTHER


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Context manager: pause garbage collection, so that no reference cycles are freed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def kind_of(module: str) -> str:
    """Return the name of a module with layer numbers replaced by `*`, such as `model.layers.*.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or "the loss"
