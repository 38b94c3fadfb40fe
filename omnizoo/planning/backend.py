"""A device that is not there: its tensors have shapes, types and lifetimes, but no memory. Those of the host are real.

The real training step runs on it as on an accelerator, kernels for accelerators included. Whatever makes the host wait
for the device is noted: reading a value, shapes that depend on values, and copies that are not asynchronous. Small
whole numbers that came from the host (ids, boundaries of samples, sizes of grids) keep their values on the way, so that
shapes are the true ones.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from omnizoo.ops.device import PLANNED
from omnizoo.ops.torch_private import (
    DEVICE_OF,
    FakeTensor,
    FakeTensorMode,
    register_device,
    tensors_made_on_host,
    tree_leaves,
    tree_map_only,
    written_arguments,
)

MOST_KNOWN, MOST_FRACTIONS = 2**22, 64  # elements of a tensor whose values are kept: of whole numbers, and others
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
FILLED = {"arange", "zeros", "ones", "full"}  # what makes known values of nothing
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
SHAPED_BY_VALUES = {
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
}
FUSED = ("silu_backward", "mish_backward", "_fused_rms_norm")  # each a kernel on accelerators, and parts elsewhere
BACKWARD = "torch's backward"  # which no line of Python calls
PASSING_ON = (
    "planning",
    "parallel/collectives.py",
    "ops/torch_private.py",
)  # stand between an operator and who calls it
WATCHING = tuple(str(Path(__file__).parents[1] / name) for name in PASSING_ON)
_TORCHS_TENSOR = torch.tensor
PACKAGE, TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


class Stream:
    """There is one, and nothing on it takes time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Stream | None = None) -> "Event":
        return self

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class DeviceModule:
    """What torch, and FSDP in it, ask of the module of a device (`torch.cuda` is one)."""

    Stream: ClassVar[type] = Stream
    Event: ClassVar[type] = Event
    the_stream = Stream()

    @staticmethod
    def is_available() -> bool:
        return False  # to whoever looks for a device to run on

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def current_stream(device: object = None) -> object:
        return DeviceModule.the_stream

    @staticmethod
    def stream(stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]  # without it a recomputing backward ends the process

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


@dataclass(frozen=True)
class Sync:
    """A place where the host waits for the device."""

    where: str  # file:line, of OmniZoo where it has a part in it
    function: str
    kind: str  # `value` read, `shape` that depends on values, a copy `to_host`, or one `to_device` that is waited for
    detail: str  # the operator, and the line of another library that called it


class PretendedDevice(FakeTensorMode):
    """Enter it, and tensors on `device` are fake. `syncs` counts where the host waited; `guessed` where it read a value
    that only a real device knows, and was told 1."""

    def __init__(self) -> None:
        register_device(PLANNED, DeviceModule(), FUSED)
        super().__init__(allow_non_fake_inputs=True)
        self.device = torch.device(PLANNED, 0)
        self.syncs: Counter[Sync] = Counter()
        self.guessed: Counter[str] = Counter()
        self.operator = ""  # the last one, for messages
        self._known = WeakTensorKeyDictionary()  # fake tensor -> its values on the host
        self._spoiled: dict[int, torch.Tensor] = {}  # values overwritten by unknown ones, by storage; kept, or another
        # storage would have its address
        self._has_weights_on_host = False
        self._depth = 0  # of operators inside of operators

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole dry run."""
        with (
            replaced((FakeTensor, "tolist", lambda tensor: self.read(tensor))),
            # FSDP asks for it where weights were gathered for a backward pass that a frozen part does not have.
            replaced((torch.accelerator, "current_stream", DeviceModule.current_stream)),
            # Not by a function mode: it would be asked for every attribute of every tensor, half of a plan's time.
            replaced((torch, "tensor", self._tensor)),
            tensors_made_on_host(),
            self,
        ):
            yield

    def read(self, tensor: torch.Tensor) -> Any:
        """The values of a tensor, as nested lists."""
        if tensor.device.type == PLANNED:
            self.wait("value", "tolist")
        return self._on_host(tensor).tolist()

    def _tensor(self, data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.tensor([a, b])` of tensors a and b reads their values without asking any dispatch mode."""
        if isinstance(data, list | tuple):
            data = tree_map_only(FakeTensor, self.read, data)
        return _TORCHS_TENSOR(data, *args, **kwargs)

    def wait(self, kind: str, operator: str) -> None:
        if self._depth:  # what an operator is made of waits as part of it
            return
        where, function, caller = _caller()
        self.syncs[Sync(where, function, kind, operator if caller == where else f"{operator} at {caller}")] += 1

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        if func.namespace == "prim":  # asks for a layout
            return super().dispatch(func, types, args, kwargs or {})
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for x in tensors):
            return NotImplemented  # DTensor unpacks itself, and its local tensors come by
        if not self._depth:
            self.operator = str(func)
        target = kwargs.get("device")
        name = func._schema.name.removeprefix("aten::")
        if name == "empty_like" and args[0].device.type == "meta" and target is not None and target.type == "cpu":
            # Weights that are to be on the host get memory there: nothing of it is real either.
            self._has_weights_on_host = True
            return FakeTensor(self, func(args[0], **{**kwargs, "device": args[0].device}), target)
        is_real = not any(isinstance(x, FakeTensor) for x in tensors)
        if is_real and (target is None or torch.device(target).type != PLANNED):
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_", "to"):
            source, to = args[name == "copy_"], torch.device(target or args[0].device)
            if source.device.type == PLANNED and to.type == "cpu":
                return self._to_host(name, source, args, kwargs)
            if source.device.type == "cpu" and to.type == PLANNED and not _is_asynchronous(name, args, kwargs):
                self.wait("to_device", name)
        if name in READS:
            self.wait("value", name)
            return func(*(self._on_host(x) for x in tensors))
        if name == "_grouped_mm" and tensors[0].dtype != torch.bfloat16:
            # torch 2.13 knows its shapes for bf16 only, though its kernels take fp32 and fp16.
            with self._within():
                half = func(*(x.to(torch.bfloat16) if i < 2 else x for i, x in enumerate(args)), **kwargs)
                return half.to(tensors[0].dtype)
        by_mask = name in INDEXING and any(_is_mask(x) for x in args[1])
        if by_mask or (name in SHAPED_BY_VALUES and kwargs.get("output_size") is None):
            self.wait("shape", name)
        if by_mask and all(self.values_of(x) is not None for x in args[1] if _is_mask(x)):
            return self._by_mask(func, args, kwargs)
        known = self._compute(func, args, kwargs, tensors)
        if known is not None and name in SHAPED_BY_VALUES:
            with self._within():
                return tree_map_only(torch.Tensor, lambda x: x.to(self.device), known)
        if is_real:
            args, kwargs = tree_map_only(torch.Tensor, self.from_tensor, (args, kwargs))
        with self._deeper():
            result = super().dispatch(func, types, args, kwargs)
        if name == "copy_" and args[0].shape == args[1].shape:
            values = self.values_of(args[1])
            known = None if values is None or values.is_meta else values.to(args[0].dtype, copy=True)
        if known is not None:
            self._remember(result, known)
        return result

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextmanager
    def _within(self) -> Iterator[None]:
        """For operators that stand for the one that was called."""
        with self._deeper(), self:
            yield

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor as one of the host, if they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        values: torch.Tensor | None = self._known.get(tensor)
        return None if values is None or _storage(values) in self._spoiled else values

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.values_of(tensor)
        if values is not None:
            return values
        self.guessed[_caller()[0]] += 1
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)  # no memory, whatever its size

    def _to_host(self, name: str, source: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        is_known = not source.is_floating_point() or self.values_of(source) is not None
        if self._has_weights_on_host and name != "copy_" and not is_known:
            # Their gradients go there, too.
            if not _is_asynchronous(name, args, kwargs):
                self.wait("to_host", name)
            shape = torch.empty_like(source, device="meta", dtype=kwargs.get("dtype") or source.dtype)
            return FakeTensor(self, shape, torch.device("cpu"))
        self.wait("to_host", name)
        values = self._on_host(source)
        if name == "copy_":
            copied: torch.Tensor = args[0].copy_(values)
            return copied
        return values.to(kwargs.get("dtype") or source.dtype, copy=self.values_of(source) is not None)

    def _by_mask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rows picked by a mask, of which it is known where it is true."""
        places: list[Any] = []
        for index in args[1]:
            if _is_mask(index):
                values = self.values_of(index)
                assert values is not None
                places += values.nonzero(as_tuple=True)
            else:
                places.append(index)
        with self._within():
            return func(args[0], [None if i is None else i.to(self.device) for i in places], *args[2:], **kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The result on the host, where all that goes in is known and little; else None."""
        name = func._schema.name.removeprefix("aten::")
        if func.namespace != "aten" or not (tensors or name in FILLED):
            return None
        if any(_is_too_much(x) or x.device.type == "meta" for x in tensors):  # not `is_meta`, which is an operator
            return None
        values = {id(x): self.values_of(x) for x in tensors}
        if any(value is None for value in values.values()):
            self._spoil(func, args, kwargs)
            return None
        dtype = kwargs.get("dtype")
        if not tensors and (dtype.is_floating_point if dtype else name != "arange"):
            return None
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        args, kwargs = tree_map_only(torch.Tensor, lambda x: values[id(x)], (args, kwargs))
        return func(*args, **kwargs)

    def _spoil(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written_arguments(func, args, kwargs):
            values = self._known.get(tensor) if isinstance(tensor, FakeTensor) else None
            if values is not None:
                self._spoiled[_storage(values)] = values

    def _remember(self, result: Any, known: Any) -> None:
        for fake, values in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(values, torch.Tensor) and not _is_too_much(values):
                assert fake.shape == values.shape, f"{self.operator}: {fake.shape} is {values.shape} on the host"
                self._known[fake] = values


@contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """For the length of the block, (owner, name, value): `owner.name` is `value`."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _is_asynchronous(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host goes on at once. Else it waits until the device has come as far as the copy."""
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _is_too_much(values: torch.Tensor) -> bool:
    """To be kept: what sizes are made of are whole numbers, and a few fractions on the way to them."""
    return values.is_complex() or values.numel() > (MOST_FRACTIONS if values.is_floating_point() else MOST_KNOWN)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _storage(values: torch.Tensor) -> int:
    return int(values.untyped_storage()._cdata)


def _caller() -> tuple[str, str, str]:
    """(the line of OmniZoo nearest to the operator, its function, the line nearest to it outside of torch)."""
    frame: FrameType | None = sys._getframe(2)
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(PACKAGE) and not file.startswith(WATCHING)
        if not nearest and (own or not file.startswith((TORCH, PACKAGE, "<"))):
            nearest = short_name(file, frame.f_lineno)
        if own:
            return short_name(file, frame.f_lineno), _function(frame), nearest
        frame = frame.f_back
    return nearest or BACKWARD, "", nearest or BACKWARD


def _function(frame: FrameType) -> str:
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:  # a comprehension belongs to one
        frame = frame.f_back
    return frame.f_code.co_name


def short_name(file: str, line: int) -> str:
    """`file:line`, from the package on; a user's own file as it is seen from here."""
    path = Path(file)
    if "site-packages" in path.parts:
        path = Path(*path.parts[path.parts.index("site-packages") + 1 :])
    elif file.startswith(PACKAGE):
        path = path.relative_to(Path(PACKAGE).parent)
    elif path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line}"
