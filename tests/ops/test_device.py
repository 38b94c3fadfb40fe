"""Device facts: the right backend and peak for each device."""

import os

import psutil
import pytest
import torch
import torch.distributed as dist

from omnizoo.config.errors import UserError
from omnizoo.ops import device as ops
from omnizoo.ops.device import backend_for, memory_gb, peak_flops, peak_flops_of, pick_device
from omnizoo.parallel import process

CPU = torch.device("cpu")


class FakeAccelerator:
    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count, self.index = kind, count, -1

    def current_accelerator(self, check_available: bool) -> torch.device:
        assert check_available, "a driver without a device must not win over the CPU"
        return torch.device(self.kind)

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, index: int) -> None:
        self.index = index


def test_ranks_without_accelerator_use_cpu_and_gloo(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert pick_device(0) == pick_device(3) == CPU
    assert backend_for(CPU) == "gloo"


def test_local_rank_selects_its_accelerator_as_current_device(monkeypatch):
    fake = FakeAccelerator("cuda", 4)
    monkeypatch.setattr(ops.torch, "accelerator", fake)
    assert pick_device(3) == torch.device("cuda", 3)
    assert fake.index == 3


def test_requested_device_is_used_or_raises(monkeypatch):
    monkeypatch.setattr(ops.torch, "accelerator", FakeAccelerator("cuda", 4))
    assert pick_device(7, "cpu") == CPU
    assert pick_device(1, "cuda") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"^--device: 'npu' .* cpu or cuda"):
        pick_device(0, "npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(UserError, match=r"^--device: 'cuda' .* cpu"):
        pick_device(0, "cuda")


def test_expandable_segments_are_default_unless_user_sets_allocator(monkeypatch):
    monkeypatch.setattr(ops.torch, "accelerator", FakeAccelerator("cuda", 1))
    for name in ops.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    pick_device(0)
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    pick_device(0)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")


class FailedError(Exception):
    pass


def test_failing_rank_on_accelerator_aborts_its_groups(monkeypatch):
    """An orderly end would wait for collectives that nobody joins any more."""
    ended, told = [], []
    monkeypatch.setattr(process, "pick_device", lambda local_rank, wanted: torch.device("cuda", 0))
    monkeypatch.setattr(process, "backend_for", lambda device: "gloo")
    started = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id, **rest: started(backend, **rest))
    monkeypatch.setattr(process, "abort_groups", lambda: (ended.append("aborted"), dist.destroy_process_group()))
    with (
        pytest.raises(FailedError),
        process.process_group((0, 1, 0), on_failure=lambda rank, error: told.append(len(ended))),
    ):
        raise FailedError
    assert ended == ["aborted"]
    assert told == [0]  # before that
    with process.process_group((0, 1, 0)):
        pass
    assert ended == ["aborted"]
    assert not dist.is_initialized()


def test_more_processes_than_accelerators_raises(monkeypatch):
    monkeypatch.setattr(ops.torch, "accelerator", FakeAccelerator("cuda", 4))
    with pytest.raises(UserError, match=r"^--nproc: local rank 4 .*--nproc 4`"):
        pick_device(4)


def test_accelerator_without_collective_backend_falls_back_to_cpu(monkeypatch, caplog):
    monkeypatch.setattr(ops.torch, "accelerator", FakeAccelerator("mps", 1))
    assert pick_device(0) == CPU
    assert "mps" in caplog.text


@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_accelerator_backend_keeps_gloo_for_cpu_tensors(kind, backend):
    assert backend_for(torch.device(kind, 0)) == f"cpu:gloo,{kind}:{backend}"


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H800", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_device_has_peak_flops(name, precision, tflops):
    assert peak_flops_of(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA L40",
        "NVIDIA H2000",
        "AMD Instinct MI250X / MI250",
        "Ascend910B3",
        "CPU",
    ],
)
def test_similar_device_name_has_no_peak_flops(name):
    assert peak_flops_of(name, "bf16") is None


def test_cpu_and_fp64_have_no_peak_flops():
    assert peak_flops(CPU, "fp32") is None
    assert peak_flops_of("NVIDIA H200", "fp64") is None


def test_cpu_memory_is_resident_set_size():
    ballast = torch.ones(2**28, dtype=torch.uint8)
    memory = memory_gb(CPU)
    assert memory == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.05)
    assert memory > ballast.numel() / 2**30
