"""Select the device of a process, get its collective backend, peak FLOP/s and memory, and copy tensors to and from it.

No function in this file communicates with other ranks.
"""

import logging
import os
import re
from pathlib import Path

import psutil
import torch

from omnizoo.config.errors import UserError

log = logging.getLogger(__name__)

PLANNED = "planned"  # the device type of a dry run, which simulates an accelerator with fake tensors
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}  # torch calls ROCm devices "cuda", and RCCL "nccl"

# Dense peak TFLOP/s from the vendors' data sheets. The pattern must match the full device name, so reduced variants
# (laptop, MIG slice, "4090 D") are unknown instead of wrong. Numbers for bf16 assume accumulation in fp32, without
# sparsity. Numbers for fp32 exclude TF32; for AMD, they assume matrix cores. torch shows an MI250X as two devices, each
# with half the peak. Ascend 910B is missing, because the name covers several chips that no public data sheet
# distinguishes.
PEAK_TFLOPS = {
    r"NVIDIA A100.*": {"bf16": 312.0, "fp32": 19.5},
    r"NVIDIA (H100|H800) PCIe": {"bf16": 756.0, "fp32": 51.0},
    r"NVIDIA (H100|H200) NVL": {"bf16": 835.0, "fp32": 60.0},
    r"NVIDIA (H100 80GB HBM3|H200|H800)": {"bf16": 989.0, "fp32": 67.0},
    r"NVIDIA H20": {"bf16": 148.0, "fp32": 44.0},
    r"NVIDIA B200": {"bf16": 2250.0, "fp32": 75.0},
    r"NVIDIA L40S": {"bf16": 362.0, "fp32": 91.6},
    r"NVIDIA GeForce RTX 4090": {"bf16": 165.2, "fp32": 82.6},
    r"AMD Instinct MI250X": {"bf16": 191.5, "fp32": 47.9},
    r"AMD Instinct MI300X( OAM)?": {"bf16": 1307.4, "fp32": 163.4},
}


def pick_device(local_rank: int, device_type: str | None = None) -> torch.device:
    """Select the device of this process, and make an accelerator the current device.

    Args:
        local_rank: Rank within the node. It is also the index of the accelerator.
        device_type: Device type to use. Default: an accelerator, or the CPU if the machine has no accelerator with a
            collective backend.

    Raises:
        UserError: If the machine has no device of type `device_type`, or fewer devices than ranks.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_type is not None and (accelerator is None or accelerator.type != device_type):
        available = "cpu" if accelerator is None else f"cpu or {accelerator.type}"
        raise UserError(f"--device: {device_type!r} is not available on this machine. Use {available}.")
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type not in BACKENDS:
        log.warning("training on the CPU, because %s devices have no collective backend", accelerator.type)
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise UserError(
            f"--nproc: local rank {local_rank} needs {local_rank + 1} devices of type {accelerator.type}, but this "
            f"process can use {num_devices}. Use `--nproc {num_devices}` on this node, and make every device visible "
            "to each process."
        )
    if allocator_settings() is None:
        # Packs differ in length, so segments of fixed sizes would fragment the memory. torch reads the variable when
        # the device is first used.
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def allocator_settings() -> str | None:
    """Return the user's settings for the device allocator, or None if no such variable is set."""
    for name in ALLOCATOR_SETTINGS:
        if name in os.environ:
            return os.environ[name]
    return None


def backend_for(device: torch.device) -> str:
    """Return the backend for `init_process_group`. CPU tensors (checkpoints, object collectives) always use gloo."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{BACKENDS[device.type]}"


def is_host(device: torch.device) -> bool:
    """Whether `device` is the CPU, where tensors need no copies to a device and no host syncs."""
    return device.type == "cpu"


def use_tensor_cores(device: torch.device) -> None:
    """Allow TF32 for matmuls in fp32, where the device supports it. Has no effect on CPUs.

    This is meant for bf16 runs, in which routers and gradient norms stay in fp32. Runs in fp32 must not call it.
    """
    if not is_host(device):
        torch.set_float32_matmul_precision("high")


def has_flash(device: torch.device) -> bool:
    """Whether torch has flash attention with `cu_seqlens` for bf16 and fp16 on `device`."""
    return device.type in ("cuda", PLANNED)


def has_triton(device: torch.device) -> bool:
    """Whether the optional kernels for linear attention and short convolutions support `device`."""
    return device.type in ("cuda", PLANNED)


def has_float64(device: torch.device) -> bool:
    """Whether `device` supports float64."""
    return device.type in ("cpu", "cuda", PLANNED)


class HostCopy:
    """An asynchronous copy of a tensor to the host. It does not delay work that is launched later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)
        self._complete = None  # event, recorded when the copy is complete
        if not is_host(tensor.device):
            self._complete = torch.get_device_module(tensor.device).Event()
            self._complete.record()

    def values(self) -> list[float]:
        """Wait for the copy and return its values."""
        if self._complete is not None:
            self._complete.synchronize()
        values: list[float] = self._host.tolist()
        return values


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` in pinned memory if an asynchronous copy to `device` needs it, and otherwise unchanged."""
    if device.type in ("cpu", PLANNED) or tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory()


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an asynchronous copy on `device`, without a host sync, or the tensor itself if `device` is the CPU.

    The copy is enqueued on the compute stream. Later operators on that stream run after it, so no event is needed.
    """
    return pinned(tensor, device).to(device, dtype or tensor.dtype, non_blocking=True)


def device_name(device: torch.device) -> str:
    """Return the name that the vendor gives to `device`, or "CPU"."""
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak FLOP/s of `device` at `precision` (as in `train.precision`), or None if unknown."""
    return peak_flops_of(device_name(device), precision)


def peak_flops_of(name: str, precision: str) -> float | None:
    """Return the dense peak FLOP/s of the device with this name, or None if unknown."""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name) and "MIG" not in name and precision in tflops:
            return tflops[precision] * 1e12
    return None


def memory_gb(device: torch.device) -> float:
    """Return the peak allocation on an accelerator, or the current memory of this process on CPUs, in GiB.

    On CPUs, the peak of this process is unknown. `ru_maxrss` survives fork and exec, so it may be the peak of the
    launcher.
    """
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss) / 2**30
    return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**30


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes. On CPUs, it is at most the memory limit of the container."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    total = int(psutil.virtual_memory().total)
    limit_file = Path("/sys/fs/cgroup/memory.max")
    if not limit_file.is_file():
        return total
    limit = limit_file.read_text().strip()  # a number of bytes, or "max"
    return min(total, int(limit)) if limit.isdecimal() else total


def available_memory() -> int:
    """Return the available memory of the host in bytes."""
    return min(int(psutil.virtual_memory().available), total_memory(torch.device("cpu")))
