"""Memory over a step: what is allocated when, by which part of the training and in which module, and when it is freed.

It sees every tensor that an operator makes, and the end of its storage; so it counts what an allocator would be asked
for. Workspaces inside kernels and what an allocator loses between blocks are not seen.
"""

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omnizoo.ops.torch_private import DEVICE_OF, TorchDispatchMode, is_fake, quiet_shard_propagation, tree_leaves
from omnizoo.parallel.collectives import CollectiveCounter
from omnizoo.parallel.shard import local_of
from omnizoo.planning.work import Work

WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED = "weights", "gradients", "optimizer", "gathered weights"
ACTIVATIONS, LOGITS, EXCHANGE, OTHER = "activations", "logits", "exchange buffers", "other"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, EXCHANGE, OTHER)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
EXCHANGES = ("/parallel/exchange.py", "/parallel/ulysses.py", "/parallel/ring.py")
ALIGNED = 512  # bytes: what an allocator of an accelerator gives out is a multiple of it
DEEPEST = 30  # frames that are looked at to see who allocates


@dataclass(eq=False)
class Block:
    """A piece of memory."""

    bytes: int
    part: str
    module: str
    phase: str


@dataclass(frozen=True)
class Peak:
    bytes: int
    parts: dict[str, int]
    activations: dict[str, int]  # by module, layers of one kind together
    module: str
    phase: str


@dataclass(frozen=True)
class Timeline:
    """Memory by part after each allocation and release of a step."""

    bytes: npt.NDArray[np.int64]  # [parts, events]
    phases: list[tuple[int, str]]  # where each begins


class Ledger(TorchDispatchMode):
    """`with ledger.watching(model, optimizer): ...` around a dry run; `begin_step` before each step."""

    def __init__(self, device: torch.device, rounded: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.rounded = device, rounded
        self.vocabulary = 0  # the width of logits
        self.phase = BACKWARD
        self._modules: list[str] = []  # in whose forward pass we are
        self._behind = ""  # in whose backward pass
        self._blocks: dict[int, Block] = {}  # alive, by storage
        self._ends: dict[int, Any] = {}
        self._events: list[tuple[Block, int, str]] = []
        self._marks: list[tuple[int, str]] = []
        self._base: list[tuple[Block, int]] = []  # alive when the step began
        self._muted = False
        self.see_on_host: Callable[[torch.Tensor], None] = lambda _: None  # tensors of a host that is not real
        self.work = Work(self.device)
        self.traffic: CollectiveCounter | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it unpacks itself, and its local tensors come by
        if self.traffic is not None:  # a mode of its own would double the calls
            self.traffic.see(func, args)
        result = func(*args, **(kwargs or {}))
        if not self._muted:
            self.work.see(func, args, kind_of(self.module), self.phase, result, kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor, part: str | None = None) -> Block | None:
        local = local_of(tensor)
        if tensor.device != self.device:
            if is_fake(local) and tensor.device.type == "cpu":
                self.see_on_host(local)
            return None
        storage = local.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = Block(0, part or self._part(local), self.module, self.phase)
            self._blocks[key] = block
            self._ends[key] = weakref.finalize(storage, self._end, key)
            self._set(block, storage.nbytes())
        elif part is not None:
            block.part = part
        return block

    @property
    def module(self) -> str:
        return self._modules[-1] if self._modules else self._behind

    def begin_step(self, traffic: CollectiveCounter | None = None) -> None:
        """Forget what happened so far, but for what is in memory. `traffic` is told all operators from here on."""
        self.traffic = traffic
        self._base = [(block, block.bytes) for block in self._blocks.values()]
        self._events, self._marks = [], []
        self.work = Work(self.device)

    def end_step(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.see(parameter.grad, GRADIENTS)

    def peak(self) -> Peak:
        sizes = dict.fromkeys(PARTS, 0)
        modules: dict[str, int] = {}
        at = 0
        total = sum(size for _, size in self._base)
        most, where = total, ""
        for i, (_, delta, module) in enumerate(self._events, start=1):
            total += delta
            if total > most:
                most, at, where = total, i, module
        phase = [name for first, name in self._marks if first < max(1, at)][-1:] or [FORWARD]
        for block, delta in [*self._base, *((block, delta) for block, delta, _ in self._events[:at])]:
            sizes[block.part] += delta
            if block.part == ACTIVATIONS:
                name = kind_of(block.module)
                modules[name] = modules.get(name, 0) + delta
        held = sorted(((name, size) for name, size in modules.items() if size), key=lambda pair: -pair[1])
        return Peak(most, sizes, dict(held), where, phase[0])

    def timeline(self) -> Timeline:
        number = {part: i for i, part in enumerate(PARTS)}
        steps = np.zeros((len(PARTS), len(self._events) + 1), np.int64)
        for block, size in self._base:
            steps[number[block.part], 0] += size
        for i, (block, delta, _) in enumerate(self._events, start=1):
            steps[number[block.part], i] += delta
        return Timeline(steps.cumsum(1), list(self._marks))

    @contextmanager
    def muted(self) -> Iterator[None]:
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every operator from here on."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            block = self._blocks.get(storage._cdata)
            if block is not None:
                if block.part != OPTIMIZER:  # which may be on the host meanwhile
                    block.part = GATHERED  # nobody but FSDP frees memory and takes it again
                self._set(block, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with quiet_shard_propagation(DTensor, self.muted), self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    @contextmanager
    def following(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Know in which module and phase we are; what `model` holds are weights from here on."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.see(tensor, WEIGHTS)
        with ExitStack() as stack:
            for name, module in model.named_modules():
                enter = module.register_forward_pre_hook(self._enterer(name), prepend=True)
                leave = module.register_forward_hook(self._leaver(name), always_call=False)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            before = optimizer.register_step_pre_hook(lambda *_: self._turn(UPDATE))
            stack.callback(before.remove)
            yield

    def _enterer(self, name: str) -> Any:
        def enter(*_: object) -> None:
            if not name:
                self._keep_gradients()
                self._turn(FORWARD)
                self._behind = ""
            # Recomputation is left in the middle, by an exception: what was not left is cut off here.
            while self._modules and not name.startswith(self._modules[-1] and self._modules[-1] + "."):
                self._modules.pop()
            self._modules.append(name)

        return enter

    def _leaver(self, name: str) -> Any:
        def behind(_: torch.Tensor) -> None:
            self._turn(BACKWARD)
            self._modules.clear()
            self._behind = name

        def leave(module: nn.Module, args: object, out: object) -> None:
            while self._modules and self._modules.pop() != name:
                pass
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(behind)

        return leave

    def _turn(self, phase: str) -> None:
        if phase != self.phase:
            if phase == UPDATE:
                self._keep_gradients()
                self._behind = ""
            self.phase = phase
            self._marks.append((len(self._events), phase))

    def _keep_gradients(self) -> None:
        """What was made in backward and outlasts it are gradients."""
        for block in self._blocks.values():
            if block.phase == BACKWARD and block.part in (OTHER, EXCHANGE, ACTIVATIONS):
                block.part = GRADIENTS

    def _set(self, block: Block, size: int) -> None:
        if self.rounded:
            size += -size % ALIGNED
        if size != block.bytes:
            self._events.append((block, size - block.bytes, self.module))
            block.bytes = size

    def _end(self, key: int) -> None:
        self._ends.pop(key, None)
        self._set(self._blocks.pop(key), 0)

    def _part(self, tensor: torch.Tensor) -> str:
        if self.phase == UPDATE:
            return OPTIMIZER
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return LOGITS
        frame: FrameType | None = sys._getframe(3)
        own = False
        for _ in range(DEEPEST):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if "/distributed/fsdp/" in file:
                function = frame.f_code.co_name
                if "reduce" in function:
                    return EXCHANGE
                if "grad" in function:
                    return GRADIENTS
                if "all_gather" in function or "unshard" in function:
                    return GATHERED
            if not own and "/omnizoo/" in file and "/planning/" not in file:
                own = True
                if file.endswith(EXCHANGES):
                    return EXCHANGE
            frame = frame.f_back
        return ACTIVATIONS if self._modules or self.phase == FORWARD else OTHER


@cache
def kind_of(module: str) -> str:
    """Layers of one kind have one name: `model.layers.*.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or "the loss"
