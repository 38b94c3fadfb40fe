"""`omnizoo doctor`: check this machine and its packages.

Package versions are read from metadata, so a broken installation is reported instead of crashing the command.
"""

import argparse
import json
import os
import platform
import shutil
import time
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from omnizoo.config.versions import install_command, installed_versions

if TYPE_CHECKING:
    import torch

# Optional packages of kernels that the code imports: name of the module -> layers that use it.
KERNELS = {
    "triton": "the kernels that torch.compile generates on GPUs",
    "fla": "linear attention on GPUs; needs triton",
    "causal_conv1d": "short convolutions of recurrent layers on GPUs",
}
EXTRAS = {
    "media": "decoding of media files",
    "diffusers": "decoders with VQ models and autoencoders",
    "processors": "torchvision, which the processors of exported models need",
    "remote": "data at s3:// and gs://",
    "wandb": "logging to Weights & Biases (`log.wandb`)",
    "torchao": "optimizers with quantized state",
}
BACKENDS = ("gloo", "nccl", "xccl", "hccl")
MIN_SHARED_GB = 1  # GiB of /dev/shm below which a warning is printed
SLOW_BF16 = 5  # ratio of fp32 to bf16 speed above which bf16 is probably emulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo doctor`."""
    parser.add_argument("--json", action="store_true", help="output as one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the results of all checks. Returns 0 if training can run, 1 otherwise."""
    facts = examine()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 1 if facts["problems"] else 0


def examine() -> dict[str, Any]:
    """Return the results of all checks, including the lists `warnings` and `problems`."""
    packages = _packages()
    distributions = packages_distributions()
    kernel_versions = {name: installed_versions(distributions.get(name, [])) for name in KERNELS}
    problems = []
    for package in packages:
        if not package["ok"]:
            status = package["installed"] or "not installed"
            requirement = f"{package['name']}{package['needed']}"
            problems.append(f"{package['name']} is {status}; run: pip install '{requirement}'")
    facts: dict[str, Any] = {
        "omnizoo": version("omnizoo"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 2**30, 1),
        "packages": packages,
        "kernels": {name: next(iter(kernel_versions[name].values()), None) for name in KERNELS},
        "extras": {extra: _has_extra(extra) for extra in EXTRAS},
        "hub": _hub(),
        "warnings": [],
        "problems": problems,
    }
    try:
        facts |= _compute(facts["warnings"])
    except (ImportError, OSError, RuntimeError) as error:
        facts["problems"].append(f"torch does not work: {error}")
    if not facts.get("backends", {}).get("gloo", True):
        facts["problems"].append("torch has no gloo backend, which every run needs; install a build of torch with gloo")
    return facts


def _hub() -> dict[str, Any]:
    """Return the settings of the Hugging Face Hub: its address, the cache folder, and whether it is offline."""
    from huggingface_hub import constants

    return {
        "endpoint": constants.ENDPOINT,
        "cache": constants.HF_HUB_CACHE,
        "offline": constants.is_offline_mode(),
    }


def _packages(extra: str = "") -> list[dict[str, Any]]:
    """Return the installed and required version of each dependency of OmniZoo, or of one of its extras."""
    packages = []
    for requirement in map(Requirement, requires("omnizoo") or []):
        if not _belongs_to(requirement, extra):
            continue
        name = requirement.name
        installed = installed_versions([name]).get(name)
        is_ok = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        packages.append({"name": name, "needed": str(requirement.specifier), "installed": installed, "ok": is_ok})
    return packages


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement belongs to `extra`, or to OmniZoo without extras if `extra` is empty."""
    if not extra:
        return requirement.marker is None
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra})


def _has_extra(extra: str) -> bool:
    """Whether all packages of an extra are installed."""
    packages = _packages(extra)
    return bool(packages) and all(package["ok"] for package in packages)


def _cpu_name() -> str:
    """Return the model name of the CPU, or the architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _compute(warnings: list[str]) -> dict[str, Any]:
    """Return the devices, collective backends and matmul speed. Problems are appended to `warnings`."""
    import torch

    from omnizoo.ops.device import EXPANDABLE, allocator_settings, device_name, pick_device

    device = pick_device(local_rank=0)
    num_devices = torch.accelerator.device_count() if device.type != "cpu" else 0
    devices = []
    for i in range(num_devices):
        memory = torch.accelerator.get_memory_info(torch.device(device.type, i))[1]
        name = device_name(torch.device(device.type, i))
        devices.append({"name": name, "memory_gb": round(memory / 2**30, 1)})

    fp32 = _matmul_gflops(device, torch.float32)
    bf16 = _matmul_gflops(device, torch.bfloat16)
    if fp32 > SLOW_BF16 * bf16:
        warnings.append(f"bf16 is {fp32 / bf16:.0f}x slower than fp32 on this device; train with train.precision: fp32")
    settings = allocator_settings()
    if devices and settings is not None and EXPANDABLE not in settings:
        warnings.append(
            f"the allocator settings are {settings!r}; add {EXPANDABLE}, because packs of different lengths fragment "
            "the memory"
        )
    shared = _shared_memory_gb()
    if shared is not None and shared < MIN_SHARED_GB:
        warnings.append(
            f"/dev/shm has {shared} GiB; loader workers (data.workers) send packs through it, so enlarge it, or set "
            "data.workers: 0"
        )
    return {
        "device": device.type,
        # These are the defaults of a run on this machine.
        "defaults": {"precision": "bf16" if devices else "fp32", "tf32": bool(devices), "allocator": settings},
        "shared_memory_gb": shared,
        "devices": devices,
        "backends": {name: torch.distributed.is_backend_available(name) for name in BACKENDS},
        "gflops": {"fp32": fp32, "bf16": bf16},
    }


def _matmul_gflops(device: "torch.device", dtype: "torch.dtype") -> float:
    """Return the measured speed of a square matmul in GFLOP/s."""
    import torch

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


def _shared_memory_gb() -> float | None:
    """Return the size of /dev/shm in GiB; None if it does not exist."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    return round(shutil.disk_usage(folder).total / 2**30, 1)


def _print(facts: dict[str, Any]) -> None:
    """Print the results as a table, followed by the warnings and problems."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"omnizoo {facts['omnizoo']}", title_justify="left", show_header=False)

    def add_row(name: str, value: str, note: str = "", style: str = "") -> None:
        table.add_row(name, Text(value, style), Text(note, "dim"))

    add_row("python", facts["python"])
    add_row("cpu", facts["cpu"], f"{facts['cores']} cores for this process")
    add_row("memory", f"{facts['ram_gb']} GiB")
    add_row("free disk space", f"{facts['free_disk_gb']} GiB")
    hub = facts["hub"]
    add_row("hub", "offline" if hub["offline"] else hub["endpoint"], f"cache: {hub['cache']}")
    if "device" in facts:
        for i, device in enumerate(facts["devices"]):
            add_row(f"{facts['device']} {i}", device["name"], f"{device['memory_gb']} GiB")
        add_row(
            "training device",
            facts["device"],
            "" if facts["devices"] else "no accelerator with a collective backend",
        )
        add_row("precision", facts["defaults"]["precision"], "default of train.precision")
        add_row("backends", ", ".join(name for name, available in facts["backends"].items() if available))
        add_row("matmul", f"{facts['gflops']['fp32']} GFLOP/s in fp32", f"{facts['gflops']['bf16']} GFLOP/s in bf16")
    table.add_section()
    for package in facts["packages"]:
        style = "green" if package["ok"] else "bold red"
        add_row(package["name"], package["installed"] or "missing", f"needs {package['needed']}", style)
    table.add_section()
    for kernel, kernel_version in facts["kernels"].items():
        style = "green" if kernel_version else "yellow"
        add_row(kernel, kernel_version or "missing", f"optional: {KERNELS[kernel]}", style)
    for extra, is_installed in facts["extras"].items():
        if is_installed:
            add_row(f"extra: {extra}", "installed", EXTRAS[extra], "green")
        else:
            add_row(f"extra: {extra}", "missing", f"{EXTRAS[extra]}; {install_command(extra)}", "yellow")

    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(table)
    for warning in facts["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), soft_wrap=True)
    for problem in facts["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if not facts["problems"]:
        console.print("training can run on this machine", style="green")
