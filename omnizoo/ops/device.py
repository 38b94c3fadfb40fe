"""The device of a process: selection, collective backend, peak FLOP/s, memory, and copies to and from it.

No function in this file communicates with other ranks.
"""

import logging
import os
import re
from pathlib import Path

import psutil
import torch

from omnizoo.config.errors import UserError

PLANNED = "planned"  # the device type of a dry run, which simulates an accelerator with fake tensors
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}  # torch names ROCm devices cuda, and RCCL nccl

# Dense peak TFLOP/s from the vendors' data sheets. The pattern must match the full device name, so that a reduced
# variant (laptop, MIG slice, "4090 D") is unknown instead of wrong. bf16 accumulates in fp32, without sparsity; fp32 is
# not TF32. The fp32 number of AMD is for its matrix cores, and torch shows an MI250X as two devices, each with half the
# peak. Ascend 910B is missing, because the name covers several chips that no public data sheet distinguishes.
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


def pick_device(local_rank: int, wanted: str | None = None) -> torch.device:
    """Select the device of this process, and make an accelerator the current device.

    Args:
        local_rank: Rank within the node, which is the index of the accelerator.
        wanted: Device type to use. By default an accelerator, or the CPU if the machine has none with a collective
            backend.

    Raises:
        UserError: If the machine has no device of type `wanted`, or fewer devices than ranks.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted is not None and (accelerator is None or accelerator.type != wanted):
        there = "no accelerator" if accelerator is None else accelerator.type
        raise UserError(f"--device is {wanted!r}, but this machine has {there}; expected cpu, or what is there")
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type not in BACKENDS:
        logging.getLogger(__name__).warning("%s has no collective backend; training on the CPU", accelerator.type)
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} finds {count} {accelerator.type} device(s) on this node: start at most {count} "
            f"process(es) here (`--nproc {count}`), and let each of them see every device"
        )
    if allocator_settings() is None:
        # Packs differ in length, so segments of fixed sizes would fragment the memory. torch reads the variable when
        # the device is first used.
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def allocator_settings() -> str | None:
    """Return the user's settings for the device allocator, or None if no such variable is set."""
    return next((os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ), None)


def backend_for(device: torch.device) -> str:
    """Return the backend for `init_process_group`. CPU tensors (checkpoints, object collectives) always use gloo."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{BACKENDS[device.type]}"


def is_host(device: torch.device) -> bool:
    """Whether `device` is the CPU, so that no copies and no host syncs are needed."""
    return device.type == "cpu"


def use_tensor_cores(device: torch.device) -> None:
    """Allow TF32 for matmuls in fp32, where the device supports it. Has no effect on CPUs.

    It is meant for bf16 runs, in which routers and gradient norms stay in fp32. Runs in fp32 must not call it.
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
    return device.type in ("cpu", "cuda", PLANNED)


class HostCopy:
    """An asynchronous copy of a tensor to the host, which does not delay work that is launched after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._arrival = tensor.to("cpu", non_blocking=True), None
        if not is_host(tensor.device):
            self._arrival = torch.get_device_module(tensor.device).Event()
            self._arrival.record()

    def values(self) -> list[float]:
        """Wait for the copy and return its values."""
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` in pinned memory, for asynchronous copies to `device`, or unchanged if that is not needed."""
    return tensor if device.type in ("cpu", PLANNED) or tensor.device.type != "cpu" else tensor.pin_memory()


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an asynchronous copy on `device`, without a host sync, or the tensor itself if `device` is the CPU.

    The copy is enqueued on the compute stream. Later operators on that stream run after it, so no event is needed.
    """
    return pinned(tensor, device).to(device, dtype or tensor.dtype, non_blocking=True)


def device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


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
    """Return the peak of allocated memory on an accelerator, or the current memory of this process on CPUs, in GiB.

    The peak on CPUs is not available: `ru_maxrss` survives fork and exec, so it may be that of the launcher.
    """
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss) / 2**30
    return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**30


def total_memory(device: torch.device) -> int:
    """Return the total memory of the device in bytes, or on CPUs the memory limit of this container."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    total = int(psutil.virtual_memory().total)
    return min(total, int(allowed)) if allowed.isdecimal() else total


def available_memory() -> int:
    """Return the available memory of the host in bytes."""
    return min(int(psutil.virtual_memory().available), total_memory(torch.device("cpu")))
