"""Facts about the device under a run: which one a process uses, its collective backend, its peak FLOP/s, its memory.

Nothing here talks to other ranks; `backend_for` only names what `torch.distributed` should be started with.
"""

import logging
import os
import re
from pathlib import Path

import psutil
import torch

from omnizoo.config.errors import UserError

PLANNED = "planned"  # the device of a dry run, which has shapes but no memory; it stands for an accelerator
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}  # ROCm calls itself cuda, and its RCCL nccl

# Dense peaks in TFLOP/s from the vendors' data sheets, matched against the whole device name, so that a cut-down one
# (laptop, MIG slice, "4090 D") is unknown rather than wrong. bf16 accumulates in fp32, no sparsity; fp32 is not TF32.
# AMD's fp32 is its matrix unit, and an MI250X is two devices to torch: half a card each. Ascend 910B is left out: one
# name covers several chips, and no public data sheet tells them apart.
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
    """The accelerator of this process (made the current one), or the CPU where there is none to train on; or the kind
    that is `wanted`."""
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
        # Packs differ in length, and blocks of fixed sizes would leave gaps. Read when the device is first used.
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def allocator_settings() -> str | None:
    """What the user has set for the allocator of the device's memory; None: nothing."""
    return next((os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ), None)


def backend_for(device: torch.device) -> str:
    """The backend for `init_process_group`; CPU tensors keep theirs (checkpoints, object collectives)."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{BACKENDS[device.type]}"


def is_host(device: torch.device) -> bool:
    """Whether it is the CPU itself, which nothing has to be moved to and nothing waits for."""
    return device.type == "cpu"


def use_tensor_cores(device: torch.device) -> None:
    """In a run in bf16, for the matmuls that stay in fp32 (routers, norms of gradients): TF32 where the device has it.

    Not on the CPU, and not in a run that asks for fp32."""
    if not is_host(device):
        torch.set_float32_matmul_precision("high")


def has_flash(device: torch.device) -> bool:
    """Whether torch has flash attention with `cu_seqlens` there, for half precision."""
    return device.type in ("cuda", PLANNED)


def has_cpu_flash(device: torch.device) -> bool:
    """Whether it has torch's flash attention for CPUs, one block at a time."""
    return device.type == "cpu"


def has_triton(device: torch.device) -> bool:
    """Whether packages with kernels for linear attention and short convolutions may be asked for theirs there."""
    return device.type in ("cuda", PLANNED)


def has_float64(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda", PLANNED)


class Reading:
    """Numbers on their way to the host. Work that the device is given in the meantime does not wait for them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._arrival = tensor.to("cpu", non_blocking=True), None
        if not is_host(tensor.device):
            self._arrival = torch.get_device_module(tensor.device).Event()
            self._arrival.record()

    def values(self) -> list[float]:
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, of the host, where `device` can fetch it while the host goes on; itself where there is no need."""
    return tensor if device.type in ("cpu", PLANNED) or tensor.device.type != "cpu" else tensor.pin_memory()


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy on `device`, which the host does not wait for; on the host, the tensor itself.

    It goes by the stream that computes: what comes after it there finds it complete, and memory is never used twice.
    """
    return pinned(tensor, device).to(device, dtype or tensor.dtype, non_blocking=True)


def device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak FLOP/s of `device` at `precision` (as in `parallel.precision`); None where it is not known."""
    return peak_flops_of(device_name(device), precision)


def peak_flops_of(name: str, precision: str) -> float | None:
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, name) and "MIG" not in name and precision in tflops:
            return tflops[precision] * 1e12
    return None


def memory_gb(device: torch.device) -> float:
    """GiB: the most ever allocated on an accelerator; on the CPU, what this process holds now.

    Not the CPU peak: `ru_maxrss` survives fork and exec, so a rank would report the peak of what launched it.
    """
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss) / 2**30
    return float(torch.get_device_module(device).max_memory_allocated(device)) / 2**30


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, whoever uses them now; of the CPU, what this container may use."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    total = int(psutil.virtual_memory().total)
    return min(total, int(allowed)) if allowed.isdecimal() else total


def available_memory() -> int:
    """Bytes that the host has left."""
    return min(int(psutil.virtual_memory().available), total_memory(torch.device("cpu")))
