"""A rank's tensors are written one at a time, in the safetensors format."""

import gc
import multiprocessing
from pathlib import Path

import pytest
import torch
from processes import start_server
from safetensors import safe_open

from omnizoo.checkpoint.tensor_files import read, write

MIB = 2**20


def reset_peak_memory() -> int:
    """Set the peak resident memory of this process to the current value, and return it in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_every_dtype_and_shape_is_read_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.matrix": torch.randn(5, 7, generator=generator),
        "model.transposed": torch.randn(5, 7, generator=generator).t(),
        "model.bf16": torch.randn(3, 3, generator=generator).bfloat16(),
        "model.fp64": torch.randn(3, generator=generator, dtype=torch.float64),
        "model.scalar": torch.tensor(3.5),
        "model.empty": torch.empty(0, 4),
        "model.flags": torch.tensor([True, False, True]),
        "model.int64": torch.arange(5),
    }
    (files,) = write(tensors, tmp_path).items()
    name, file = files
    assert file.bytes == (tmp_path / name).stat().st_size
    with safe_open(tmp_path / name, framework="pt") as opened:  # the safetensors library accepts the file
        for key, expected in tensors.items():
            assert torch.equal(opened.get_tensor(key), expected)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    read(loaded, tmp_path)
    for key, expected in tensors.items():
        assert torch.equal(loaded[key], expected)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs")
def test_saving_needs_memory_of_one_tensor(tmp_path: Path) -> None:
    """A new process saves: in one that has trained, malloc keeps freed memory, which counts as resident."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=check_memory_of_save, args=(tmp_path,))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


def check_memory_of_save(folder: Path) -> None:
    """Save transposed tensors. They have to be copied, as all tensors of a device have to be."""
    tensors = {f"model.{index}": torch.ones(2 * MIB, 4).t() for index in range(8)}  # 32 MiB each
    write({"model.small": torch.ones(3)}, folder / "first")  # memory that any save keeps, such as imported modules
    before = reset_peak_memory()
    write(tensors, folder / "second")
    added = peak_memory() - before
    largest = max(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert added <= 1.1 * largest, f"{added / MIB:.0f} MiB for a largest tensor of {largest / MIB:.0f} MiB"
