"""A device that is not there: its tensors have shapes, types and lifetimes, but no memory. Tensors of the host are real.

The real training step runs on it as on an accelerator, kernels for accelerators included. Whatever makes the host wait
for the device is noted: reading a value, and shapes that depend on values. Small whole numbers that came from the host
(ids, boundaries of samples, sizes of grids) keep their values on the way, so that shapes are the true ones.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from omnizoo.ops.device import PLANNED
from omnizoo.ops.torch_private import (
    FakeTensor,
    FakeTensorMode,
    register_device,
    tensors_made_on_host,
    tree_leaves,
    tree_map_only,
    written_arguments,
)

MOST_KNOWN = 2**22  # elements of a tensor whose values are kept
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
WATCHING = tuple(str(Path(__file__).parents[1] / name) for name in ("planning", "parallel/collectives.py"))
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

    Stream, Event = Stream, Event
    _stream = Stream()

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
    def current_stream(device: object = None) -> Stream:
        return DeviceModule._stream

    @staticmethod
    def stream(stream: Stream | None) -> AbstractContextManager[None]:
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
    kind: str  # `value` read, `shape` that depends on values, or a copy `to_host`
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
        self._depth = 0
        self._spoiled: set[int] = set()  # storages of values that were overwritten by unknown ones

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole dry run."""
        read, make = FakeTensor.tolist, torch.tensor

        def made(data: Any, **kwargs: Any) -> torch.Tensor:
            # Of numbers that are tensors torch reads the values behind the back of any mode.
            return make(tree_map_only(FakeTensor, self.read, data) if isinstance(data, list | tuple) else data, **kwargs)

        FakeTensor.tolist = lambda tensor: self.read(tensor)  # type: ignore[method-assign]
        torch.tensor = made  # type: ignore[assignment]
        try:
            with tensors_made_on_host(), self:
                yield
        finally:
            FakeTensor.tolist, torch.tensor = read, make  # type: ignore[method-assign]

    def read(self, tensor: torch.Tensor) -> Any:
        """The values of a tensor, as nested lists."""
        if tensor.device.type == PLANNED:
            self.wait("value", "tolist")
        return self._on_host(tensor).tolist()

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.values_of(tensor)
        if values is not None:
            return values
        self.guessed[_caller()[0]] += 1
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)  # no memory, whatever its size

    def wait(self, kind: str, operator: str) -> None:
        if self._depth:
            return
        where, caller = _caller()
        self.syncs[Sync(where, kind, operator if caller == where else f"{operator} at {caller}")] += 1

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor
        values: torch.Tensor | None = self._known.get(tensor)
        return None if values is None or _storage(values) in self._spoiled else values

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "prim":  # asks for a device or a layout
            return super().dispatch(func, types, args, kwargs or {})
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(type(x) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for x in tensors):
            return NotImplemented  # DTensor unpacks itself, and comes back
        self.operator = str(func)
        target = kwargs.get("device")
        if not any(isinstance(x, FakeTensor) for x in tensors):
            if target is None or torch.device(target).type != PLANNED:
                return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        on_device = any(isinstance(x, FakeTensor) and x.device.type == PLANNED for x in tensors)
        result = self._by_value(func, name, args, kwargs, tensors, on_device)
        if result is not None:
            return result
        if name == "_grouped_mm" and tensors[0].dtype != torch.bfloat16:
            # torch 2.13's shapes of it are for bf16 only, though its kernels take fp32 and fp16
            with self:
                half = func(*(x.to(torch.bfloat16) if i < 2 else x for i, x in enumerate(args)), **kwargs)
                return half.to(tensors[0].dtype)
        known = self._compute(func, args, kwargs, tensors)
        if known is not None and name in SHAPED_BY_VALUES:
            with self:
                return tree_map_only(torch.Tensor, lambda x: x.to(self.device), known)
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self._adopt, (args, kwargs))
        self._depth += 1  # what an operator is made of waits as part of it
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._depth -= 1
        self._remember(result, known)
        return result

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)  # type: ignore[return-value]

    def _by_value(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any], waits: bool
    ) -> Any:
        """What comes of an operator whose result depends on values; None if it is none of these."""
        is_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name == "_to_copy" or name == "copy_":
            target = torch.device(kwargs["device"]) if kwargs.get("device") else args[0].device
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != PLANNED or target.type != "cpu":
                return None
            self.wait("to_host", name)
            values = self._on_host(source)
            if name == "copy_":
                return args[0].copy_(values)
            dtype = kwargs.get("dtype") or source.dtype
            return values.to(dtype) if dtype != source.dtype else values.clone() if values.numel() else values
        if not (name in READS or name in SHAPED_BY_VALUES or is_mask):
            return None
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return None
        if waits:
            self.wait("value" if name in READS else "shape", name)
        values = [self.values_of(x) for x in tensors]
        if name in READS:
            return func(*(self._on_host(x) for x in tensors))
        if any(v is None for v in values) and is_mask:
            return self._with_known_mask(func, args, kwargs)
        return None

    def _with_known_mask(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Rows picked by a mask: by where it is true, if that is known."""
        picked: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                values = self.values_of(index)
                if values is None:
                    return None
                picked += values.nonzero(as_tuple=True)
            else:
                picked.append(index)
        with self:
            return func(args[0], [None if i is None else i.to(self.device) for i in picked], *args[2:], **kwargs)

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The result on the host, where all that goes in is known and small; else None."""
        if func.namespace != "aten" or func._schema.name == "aten::empty":
            return None
        if any(x.numel() > MOST_KNOWN or x.is_floating_point() or x.is_complex() for x in tensors):
            return None
        values = {id(x): self.values_of(x) for x in tensors}
        if any(value is None or value.is_meta for value in values.values()):
            self._spoil(func, args, kwargs)
            return None
        if not tensors and not func._schema.name.startswith(
            ("aten::arange", "aten::zeros", "aten::ones", "aten::full")
        ):
            return None
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            return None
        if not tensors and kwargs.get("dtype") is None and func._schema.name != "aten::arange":
            return None
        args, kwargs = tree_map_only(torch.Tensor, lambda x: values[id(x)], (args, kwargs))
        return func(*args, **kwargs)

    def _spoil(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in written_arguments(func, args, kwargs):
            values = self._known.get(tensor) if isinstance(tensor, FakeTensor) else None
            if values is not None:
                self._spoiled.add(_storage(values))

    def _remember(self, result: Any, known: Any) -> None:
        if known is None:
            return
        for fake, values in zip(tree_leaves(result), tree_leaves(known), strict=True):
            if isinstance(fake, FakeTensor) and isinstance(values, torch.Tensor) and not values.is_floating_point():
                assert fake.shape == values.shape, f"{self.operator}: {fake.shape} is {values.shape} on the host"
                self._known[fake] = values


def _storage(values: torch.Tensor) -> int:
    return values.untyped_storage()._cdata


def _caller() -> tuple[str, str]:
    """(the line of OmniZoo nearest to the operator, the line nearest to it outside of torch), both `file:line`."""
    frame: FrameType | None = sys._getframe(2)
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.startswith(PACKAGE) and not file.startswith(WATCHING)
        if not nearest and (own or not file.startswith((TORCH, PACKAGE, "<"))):
            nearest = short_name(file, frame.f_lineno)
        if own:
            return short_name(file, frame.f_lineno), nearest
        frame = frame.f_back
    return nearest or "autograd", nearest or "autograd"


def short_name(file: str, line: int) -> str:
    parts = Path(file).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else 0
    if file.startswith(PACKAGE):
        start = len(Path(PACKAGE).parts) - 1
    return f"{'/'.join(parts[start:])}:{line}"
