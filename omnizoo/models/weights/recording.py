"""Record what a constructor does to tensors on meta, and replay it for one tensor at a time.

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
    made: list[Window | None]  # for each output; None: an existing storage
    is_random: bool
    overwrites: Window | None

    @property
    def reads(self) -> set[int]:
        """The storages that the operation has as arguments."""
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
        self.before: dict[int, torch.UntypedStorage] = {}  # initial content of outside storages that a call changed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self._keep_outside_value(tensor)
        seen_args, seen_kwargs = tree_map_only(torch.Tensor, self.window, (args, kwargs))
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        windows = [self.window(leaf) for leaf in outputs]
        made = [None if window.storage in known else window for window in windows]
        if any(made) or written:  # the others are views and queries
            name = func.name().partition(".")[0]
            first = self.window(args[0]) if name in OVERWRITE else None
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            self._add(Call(name, func, seen_args, seen_kwargs, made, is_random, first), written)
        return out

    def opaque(self, name: str, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Record a function that samples all of `tensor` as one call."""
        window = self.window(tensor)
        self._keep_outside_value(tensor)
        self._add(Call(name, function, (window, *args), kwargs, [], True, window), [tensor])

    def window(self, tensor: torch.Tensor) -> Window:
        """Return the window of `tensor`, and keep its storage alive."""
        storage = tensor.untyped_storage()
        self.storages[id(storage)] = storage
        return Window(id(storage), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _keep_outside_value(self, tensor: torch.Tensor) -> None:
        """Copy the content of a storage that was created before the recording, before a call changes it."""
        storage = tensor.untyped_storage()
        if id(storage) not in self.writers and not tensor.is_meta:
            self.before.setdefault(id(storage), storage.clone())

    def _add(self, call: Call, written: list[torch.Tensor]) -> None:
        changed = {window.storage for window in call.made if window is not None}
        changed |= {id(tensor.untyped_storage()) for tensor in written}
        for storage in changed:
            self.writers.setdefault(storage, []).append(len(self.calls))
        self.calls.append(call)

    @torch.no_grad()
    def value(self, tensor: torch.Tensor, seed: int) -> torch.Tensor:
        """Return the value that `tensor` has if the constructor runs on the CPU instead of meta.

        Raises:
            NotSetError: If the constructor left memory of the tensor uninitialized.
        """
        window = self.window(tensor)
        needed, fresh = self._needed(window.storage)
        real: dict[int, torch.UntypedStorage] = {
            storage: torch.UntypedStorage(self.storages[storage].nbytes()) for storage in fresh
        }

        def materialise(seen: Window) -> torch.Tensor:
            if seen.storage not in real:  # created before the recording
                outside = self.before.get(seen.storage, self.storages[seen.storage])
                if outside.device.type == "meta":
                    raise NotSetError
                real[seen.storage] = outside.clone()
            return seen.on(real[seen.storage])

        is_set = True
        with torch.random.fork_rng(devices=[]):
            for number in needed:
                call = self.calls[number]
                args, kwargs = tree_map_only(Window, materialise, (call.args, call.kwargs))
                args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
                kwargs = {key: None if isinstance(value, torch.Generator) else value for key, value in kwargs.items()}
                if call.is_random:
                    torch.manual_seed(_seed_of(seed, number))
                out = call.function(*args, **kwargs)
                outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                for made, result in zip(call.made, outputs, strict=False):
                    if made is not None:
                        real[made.storage] = _laid_out(result, made)
                if "empty" in call.name:
                    is_set = False
                    _spoil(outputs[0])
        found = materialise(window)
        changes = [number for number in needed if "empty" not in self.calls[number].name]
        if not is_set and (not changes or (found.is_floating_point() and bool(found.isnan().any()))):
            raise NotSetError
        return found

    def _needed(self, storage: int) -> tuple[list[int], set[int]]:
        """Return the calls that determine `storage`, in order, and the storages whose first value does not matter."""
        needed: set[int] = set()
        overwritten: set[int] = set()
        read: set[int] = set()  # storages whose first value is read
        seen: set[tuple[int, int]] = set()
        todo = [(storage, len(self.calls))]
        while todo:
            wanted, until = todo.pop()
            before = [number for number in self.writers.get(wanted, []) if number < until]
            if (wanted, len(before)) in seen:
                continue
            seen.add((wanted, len(before)))
            for number in reversed(before):
                call = self.calls[number]
                needed.add(number)
                todo += [(other, number) for other in call.reads - {wanted}]
                whole = call.overwrites
                if whole is not None and whole.storage == wanted and whole.bytes == self.storages[wanted].nbytes():
                    overwritten.add(wanted)
                    break
            else:
                read.add(wanted)
        return sorted(needed), overwritten - read


class _RealData(TorchFunctionMode):
    """Create tensors from Python numbers on the CPU, then move them to meta.

    Directly on meta, their values would be lost without a call that a dispatch mode can record.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], torch.Tensor):
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs, device="cpu")
            return made if device is None or torch.device(device).type == "cpu" else made.to(device)
        return func(*args, **kwargs)


@contextmanager
def recording() -> Iterator[Recording]:
    """Context manager: record all operations on tensors."""
    record = Recording()

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            record.opaque(name, original, tensor, *args, **kwargs)
            return tensor

        return draw

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


def _laid_out(result: torch.Tensor, made: Window) -> torch.UntypedStorage:
    """Return the storage of `result`, with the layout and dtype that it had on meta.

    The default dtype may have been different then.
    """
    found = (result.dtype, result.shape, result.stride(), result.storage_offset())
    if found != (made.dtype, made.size, made.stride, made.offset):
        laid = torch.empty_strided(made.size, made.stride, dtype=made.dtype)
        result = laid.copy_(result)
    return result.untyped_storage()


def _spoil(tensor: torch.Tensor) -> None:
    """Fill uninitialized memory with NaN, so that reading it is detected."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the random operation `number`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "big") >> 1
