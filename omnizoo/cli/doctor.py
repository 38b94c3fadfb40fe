"""`omnizoo doctor`: check this machine and its packages.

Package versions are read from metadata, so a broken installation is reported instead of crashing the command.
"""

import argparse
import json
import os
import platform
import shutil
import time
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from omnizoo.config.versions import installed_versions

KERNELS = {
    "triton": "the kernels that torch.compile generates on GPUs",
    "flash_attn": "fast attention over packed samples on GPUs",
    "liger_kernel": "fused norms, rotary embedding and cross entropy; needs triton",
    "deep_ep": "expert dispatch over NVLink and RDMA",
    "torchao": "fp8 matmuls and low-bit optimizers",
}
EXTRAS = {"media": "decoding of media files", "wandb": "logging to Weights & Biases (`log.wandb`)"}
BACKENDS = ("gloo", "nccl", "xccl", "hccl")
LEAST_SHARED_GB = 1
SLOW_BF16 = 5  # ratio of fp32 to bf16 speed above which bf16 is probably emulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the results of all checks. Returns 0 if training can run, 1 otherwise."""
    facts = examine()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 1 if facts["problems"] else 0


def examine() -> dict[str, Any]:
    packages = _packages()
    installed = installed_versions(KERNELS)
    facts: dict[str, Any] = {
        "omnizoo": version("omnizoo"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 2**30, 1),
        "packages": packages,
        "kernels": {name: installed.get(name) if find_spec(name) else None for name in KERNELS},
        "extras": {extra: all(p["ok"] for p in _packages(extra)) for extra in EXTRAS},
        "warnings": [],
        "problems": [
            f"{p['name']} is {p['installed'] or 'not installed'}; run: pip install '{p['name']}{p['needed']}'"
            for p in packages
            if not p["ok"]
        ],
    }
    try:
        facts |= _compute(facts["warnings"])
    except (ImportError, OSError, RuntimeError) as error:
        facts["problems"].append(f"torch does not work here: {error}")
    if not facts.get("backends", {}).get("gloo", True):
        facts["problems"].append("this torch has no gloo backend, which every run needs; install another build of it")
    return facts


def _packages(extra: str = "") -> list[dict[str, Any]]:
    """Return the installed and required version of each dependency of OmniZoo, or of one of its extras."""
    found = []
    for needed in map(Requirement, requires("omnizoo") or []):
        if (needed.marker is None) if not extra else (needed.marker and needed.marker.evaluate({"extra": extra})):
            installed = installed_versions([needed.name]).get(needed.name)
            ok = installed is not None and needed.specifier.contains(installed, prereleases=True)
            found.append({"name": needed.name, "needed": str(needed.specifier), "installed": installed, "ok": ok})
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _compute(warnings: list[str]) -> dict[str, Any]:
    """Return devices, collective backends and matmul speed."""
    import torch

    from omnizoo.ops.device import EXPANDABLE, allocator_settings, device_name, pick_device

    def gflops(dtype: torch.dtype) -> float:
        size = 512 if device.type == "cpu" else 4096
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        seconds = []
        for _ in range(4):  # the first iteration is a warm-up
            start = time.perf_counter()
            matrix @ matrix
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - start)
        return round(2e-9 * size**3 / min(seconds), 1)

    device = pick_device(local_rank=0)
    devices = [
        torch.device(device.type, i) for i in range(torch.accelerator.device_count() if device.type != "cpu" else 0)
    ]
    fp32, bf16 = gflops(torch.float32), gflops(torch.bfloat16)
    if fp32 > SLOW_BF16 * bf16:
        warnings.append(f"bf16 is {fp32 / bf16:.0f}x slower than fp32 on this device; train with train.precision: fp32")
    settings = allocator_settings()
    if devices and settings is not None and EXPANDABLE not in settings:
        warnings.append(f"the allocator is set to {settings!r}; add {EXPANDABLE}, or packs of many lengths leave gaps")
    if (shared := _shared_memory_gb()) is not None and shared < LEAST_SHARED_GB:
        warnings.append(f"/dev/shm has {shared} GiB, through which loader workers (data.workers) hand over their packs")
    return {
        "device": device.type,
        # Defaults of a run on this machine.
        "defaults": {"precision": "bf16" if devices else "fp32", "tf32": bool(devices), "allocator": settings},
        "shared_memory_gb": shared,
        "devices": [
            {"name": device_name(d), "memory_gb": round(torch.accelerator.get_memory_info(d)[1] / 2**30, 1)}
            for d in devices
        ],
        "backends": {name: torch.distributed.is_backend_available(name) for name in BACKENDS},
        "gflops": {"fp32": fp32, "bf16": bf16},
    }


def _shared_memory_gb() -> float | None:
    there = Path("/dev/shm")
    return round(shutil.disk_usage(there).total / 2**30, 1) if there.is_dir() else None


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"omnizoo {facts['omnizoo']}", title_justify="left", show_header=False)

    def row(what: str, found: str, note: str = "", style: str = "") -> None:
        table.add_row(what, Text(found, style), Text(note, "dim"))

    row("python", facts["python"])
    row("cpu", facts["cpu"], f"{facts['cores']} cores for this process")
    row("memory", f"{facts['ram_gb']} GiB")
    row("free disk here", f"{facts['free_disk_gb']} GiB")
    if "device" in facts:
        for i, device in enumerate(facts["devices"]):
            row(f"{facts['device']} {i}", device["name"], f"{device['memory_gb']} GiB")
        row(
            "trains on",
            facts["device"],
            "" if facts["devices"] else "no accelerator with a collective backend was found",
        )
        row("precision", facts["defaults"]["precision"], "unless train.precision says otherwise")
        row("backends", ", ".join(name for name, available in facts["backends"].items() if available))
        row("matmul", f"{facts['gflops']['fp32']} GFLOP/s in fp32", f"{facts['gflops']['bf16']} GFLOP/s in bf16")
    table.add_section()
    for package in facts["packages"]:
        style = "green" if package["ok"] else "bold red"
        row(package["name"], package["installed"] or "missing", f"needs {package['needed']}", style)
    table.add_section()
    for kernel, found in facts["kernels"].items():
        row(kernel, found or "missing", f"optional: {KERNELS[kernel]}", "green" if found else "yellow")
    for extra, found in facts["extras"].items():
        install = "" if found else f"; pip install 'omnizoo[{extra}]'"
        row(
            f"extra: {extra}",
            "installed" if found else "missing",
            EXTRAS[extra] + install,
            "green" if found else "yellow",
        )

    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(table)
    for warning in facts["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), soft_wrap=True)
    for problem in facts["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if not facts["problems"]:
        console.print("training can run here", style="green")
