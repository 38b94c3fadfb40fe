"""Record the operations of a constructor on meta tensors, and replay them for one tensor at a time.

A model on meta takes no memory, but the values that its constructor computes are lost. A recording contains every
operation. The value of any parameter or buffer can be computed later, exactly as the constructor and the model's
initialization define it, without the other tensors of the model.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from omnizoo.ops.torch_private import TorchDispatchMode, tree_leaves, tree_map_only, written_arguments

# Operators that overwrite their first argument completely.
OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_"}
# torch 2.13 skips these functions on meta, because they read values. Each is recorded as one operation.
SKIPPED_ON_META = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")


@dataclass(frozen=True)
class Window:
    """A tensor of the recording, as a view of its storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor as a view of `storage`."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Call:
    """One recorded operation."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # tensors are replaced by windows
    kwargs: dict[str, Any]
    created: list[Window | None]  # one entry per output; None if the output uses an existing storage
    is_random: bool
    overwrites: Window | None

    @property
    def reads(self) -> set[int]:
        """The storages of the arguments, which the operation reads."""
        return {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Window)}


class NotSetError(ValueError):
    """Raised for a tensor that the constructor left, at least in part, as uninitialized memory."""


class Recording(TorchDispatchMode):
    """Recording of a constructor. Run the constructor inside `with recording:`, then call `value(tensor, seed)`.

    Each random operation is seeded by (seed, its number in the recording), so values do not depend on the order of
    evaluation or on the rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.writers: dict[int, list[int]] = {}  # storage -> numbers of calls that created or changed it
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so ids are unique
        self.before: dict[int, torch.UntypedStorage] = {}  # initial content of storages that existed before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self._keep_outside_value(tensor)
        window_args, window_kwargs = tree_map_only(torch.Tensor, self.window, (args, kwargs))
        input_storages = {id(tensor.untyped_storage()) for tensor in _tensors_in((args, kwargs))}

        out = func(*args, **kwargs)
        windows = [self.window(tensor) for tensor in _tensors_in(out)]
        created = [None if window.storage in input_storages else window for window in windows]
        if any(created) or written:  # all other operations are views and queries
            name = func.name().partition(".")[0]
            call = Call(
                name=name,
                function=func,
                args=window_args,
                kwargs=window_kwargs,
                created=created,
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                overwrites=self.window(args[0]) if name in OVERWRITE else None,
            )
            self._add(call, written)
        return out

    def opaque(self, name: str, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record `function` as a single call. It fills `tensor` with random values."""
        window = self.window(tensor)
        self._keep_outside_value(tensor)
        call = Call(
            name=name,
            function=function,
            args=(window, *args),
            kwargs=kwargs,
            created=[],
            is_random=True,
            overwrites=window,
        )
        self._add(call, [tensor])

    def window(self, tensor: torch.Tensor) -> Window:
        """Return the window of `tensor`, and keep its storage alive."""
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = storage
        return Window(id(storage), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _keep_outside_value(self, tensor: torch.Tensor) -> None:
        """Copy the content of a storage from before the recording, so that later calls can change the storage."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.writers and not tensor.is_meta:
            self.before.setdefault(id(storage), storage.clone())

    def _add(self, call: Call, written: list[torch.Tensor]) -> None:
        changed = {window.storage for window in call.created if window is not None}
        changed |= {id(tensor.untyped_storage()) for tensor in written}
        for storage in changed:
            self.writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)

    @torch.no_grad()
    def value(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the value that `tensor` would have if the constructor ran on the CPU instead of meta.

        Raises:
            NotSetError: If the constructor left memory of the tensor uninitialized.
        """
        window = self.window(tensor)
        needed, overwritten = self._needed(window.storage)
        real: dict[int, torch.UntypedStorage] = {}  # storages on the CPU
        for storage in overwritten:
            real[storage] = torch.UntypedStorage(self.storages[storage].nbytes())

        def materialize(window: Window) -> torch.Tensor:
            if window.storage not in real:  # created before the recording
                outside = self.before.get(window.storage, self.storages[window.storage])
                if outside.device.type == "meta":
                    raise NotSetError
                real[window.storage] = outside.clone()
            return window.on(real[window.storage])

        is_set = True
        with torch.random.fork_rng(devices=[]):
            for number in needed:
                call = self.calls[number]
                args, kwargs = tree_map_only(Window, materialize, (call.args, call.kwargs))
                args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
                kwargs = {key: None if isinstance(value, torch.Generator) else value for key, value in kwargs.items()}
                if call.is_random:
                    # Not torch.manual_seed, because it also seeds accelerators and formats a stack for each of them.
                    torch.default_generator.manual_seed(_seed_of(seed, number))
                outputs = _tensors_in(call.function(*args, **kwargs))
                for created, result in zip(call.created, outputs, strict=False):
                    if created is not None:
                        real[created.storage] = _laid_out(result, created)
                if "empty" in call.name:
                    is_set = False
                    _spoil(outputs[0])

        value = materialize(window)
        changes = [number for number in needed if "empty" not in self.calls[number].name]
        if not is_set and (not changes or (value.is_floating_point() and bool(value.isnan().any()))):
            raise NotSetError
        return value

    def _needed(self, storage: int) -> tuple[list[int], set[int]]:
        """Return the calls that determine `storage`, in order, and the storages whose initial value does not matter."""
        needed: set[int] = set()
        overwritten: set[int] = set()
        read: set[int] = set()  # storages whose initial value is read
        visited: set[tuple[int, int]] = set()  # (storage, number of its writers that matter)
        todo = [(storage, len(self.calls))]
        while todo:
            current, until = todo.pop()
            writers = [number for number in self.writers.get(current, []) if number < until]
            if (current, len(writers)) in visited:
                continue
            visited.add((current, len(writers)))

            for number in reversed(writers):
                call = self.calls[number]
                needed.add(number)
                todo += [(other, number) for other in call.reads - {current}]
                window = call.overwrites
                if window is None or window.storage != current:
                    continue
                if window.bytes == self.storages[current].nbytes():
                    overwritten.add(current)
                    break
            else:
                read.add(current)
        return sorted(needed), overwritten - read


class _RealData(TorchFunctionMode):
    """Create tensors from Python numbers on the CPU, then move them to meta.

    If they were created on meta directly, a dispatch mode would see no call, and their values would be lost.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], torch.Tensor):
            device = kwargs.pop("device", None)
            tensor = func(*args, **kwargs, device="cpu")
            return tensor if device is None or torch.device(device).type == "cpu" else tensor.to(device)
        return func(*args, **kwargs)


@contextmanager
def recording() -> Iterator[Recording]:
    """Context manager that records all operations on tensors."""
    record = Recording()

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            record.opaque(name, original, tensor, *args, **kwargs)
            return tensor

        return initialize

    with ExitStack() as stack:
        for name in SKIPPED_ON_META:
            original = getattr(nn.init, name)
            replaced = recorded(name, original)
            for module in list(sys.modules.values()):  # also replace copies that were imported by name
                if getattr(module, "__dict__", {}).get(name) is original:
                    stack.enter_context(patch.object(module, name, replaced))
        stack.enter_context(_RealData())
        stack.enter_context(record)
        yield record


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _laid_out(result: torch.Tensor, window: Window) -> torch.UntypedStorage:
    """Return the storage of `result`, with the layout and dtype that the tensor had on meta (`window`).

    The dtype may differ, because the default dtype may have been different at the time of the recording.
    """
    layout = (result.dtype, result.shape, result.stride(), result.storage_offset())
    if layout != (window.dtype, window.size, window.stride, window.offset):
        result = torch.empty_strided(window.size, window.stride, dtype=window.dtype).copy_(result)
    return result.untyped_storage()


def _spoil(tensor: torch.Tensor) -> None:
    """Fill uninitialized memory with NaN, so that reading it is detected."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the random operation `number`."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
