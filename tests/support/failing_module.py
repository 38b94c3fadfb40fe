"""A model that raises the error named by $FAILS_WITH on rank 1."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from own_module import TinyModel

FAILURES = {
    "memory": MemoryError(),
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of ..."),
    "allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "bug": IndexError("row 7 of a table of 5"),
}


class FailingModel(TinyModel):
    def forward(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        if os.environ["RANK"] == "1" and self.training:
            raise FAILURES[os.environ["FAILS_WITH"]]
        return super().forward(*args, **kwargs)
