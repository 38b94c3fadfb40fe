"""`omnizoo plan`: estimate the memory, communication and speed of a step without a device."""

import argparse
import json
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from omnizoo.cli.parser import path_argument
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.hub.resolve import resolve_names
from omnizoo.parallel.layout import check_step, plan_layout
from omnizoo.planning.devices import read_device

if TYPE_CHECKING:
    from omnizoo.planning.advice import Advice
    from omnizoo.planning.dry_run import Place, Result
    from omnizoo.planning.op_counter import Kernel

MAX_RANKS = 2**16
GIB = 2**30
PARTS_OF_A_STEP = {  # field of the prediction -> label in the table
    "matmuls": "matmuls",
    "attention": "attention",
    "memory": "other operators (limited by memory bandwidth)",
    "weights": "collectives of weights and gradients",
    "exchanges": "collectives of tokens and keys (without overlap)",
    "host": "device idle, waiting for the host",
}
MAX_MODULES = 8  # maximum number of modules listed by activation memory or FLOPs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `omnizoo plan`."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("--world", metavar="N", type=int, default=8, help="world size to plan for (default: 8)")
    parser.add_argument(
        "--device",
        default="h100",
        help="accelerator to plan for: a100, h100, h200, b200, mi300x, or a YAML file that describes one "
        "(default: h100)",
    )
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="rank to simulate (default: 0)")
    parser.add_argument(
        "--imbalance",
        metavar="F",
        type=float,
        default=1.0,
        help="load of MoE experts: tokens that this rank's experts receive, divided by the mean over all ranks "
        "(default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="output as one JSON object instead of tables")
    parser.add_argument(
        "--html",
        metavar="OUT",
        type=path_argument,
        help="HTML file to write, with a chart of the memory during the step (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate a step. Returns 0 if it fits into the memory of the device, 1 otherwise."""
    check_arguments(args)
    config = load_config(args.config, args.overrides, needs_data=False)
    device = read_device(args.device)
    layout = plan_layout(config.parallel, args.world)
    check_step(layout, config.train)
    config, _ = resolve_names(config, with_weights=False)
    quiet()
    from omnizoo.planning.advice import advise, usable_memory
    from omnizoo.planning.dry_run import Place, simulate

    place = Place(args.world, args.rank, device, args.imbalance)
    progress = Console(stderr=True, quiet=args.json)
    with progress.status("running the step without a device"):
        result = simulate(config, place)
    fits = result.peak.bytes <= usable_memory(place)
    advice: list[Advice] = []
    if not fits:
        with progress.status("the step does not fit: testing config changes") as status:
            advice = advise(config, place, result, status.update)

    plan = as_object(result, place, fits, advice)
    if args.json:
        print(json.dumps(plan))
    else:
        show(plan, result, place, args.device)
    if args.html is not None:
        from omnizoo.planning.page import write_page

        write_page(args.html, Path(args.config).stem, plan, result.timeline)
    return 0 if fits else 1


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UserError` for values that argparse does not check."""
    world = args.world
    if not 1 <= world <= MAX_RANKS:
        raise UserError(f"--world: {world}; expected 1 to {MAX_RANKS} ranks")
    if not 0 <= args.rank < world:
        raise UserError(f"--rank: {args.rank}; expected 0 to {world - 1} (--world is {world})")
    if not 0 < args.imbalance <= world:
        raise UserError(f"--imbalance: {args.imbalance:g}; expected a number > 0, <= {world} (--world)")


def quiet() -> None:
    """Silence torch and transformers, because their warnings do not apply to a simulated world."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def as_object(result: "Result", place: "Place", fits: bool, advice: "list[Advice]") -> dict[str, Any]:
    """Return the plan as a JSON object, for `--json`."""
    from omnizoo.planning.advice import MARGIN

    peak = result.peak
    return {
        "fits": fits,
        "peak_memory_gb": peak.bytes / GIB,
        "peak_at": {"module": peak.module or "the loss", "phase": peak.phase},
        "device_memory_gb": place.device.memory_gb,
        "margin": MARGIN,
        "memory": {part.replace(" ", "_"): size / GIB for part, size in peak.parts.items()},
        "activations": {module: size / GIB for module, size in peak.activations.items()},
        "collectives": collective_objects(result),
        "host_syncs": host_sync_objects(result),
        "flops_per_step": result.flops,
        "expected": expected_object(result, place),
        "kernels": kernel_objects(result),
        "matmul_flops": matmul_objects(result),
        "layout": result.layout,
        "recompute": result.recompute,
        "host_memory_gb": result.host / GIB,
        "world": place.world,
        "rank": place.rank,
        "imbalance": place.imbalance,
        "parameters": result.parameters,
        "checkpoint": {"gb": result.checkpoint / GIB, "seconds": save_seconds(result.checkpoint, place)},
        "tokens_per_step": result.tokens,
        "micro_batches": result.micro_batches,
        "data": result.data,
        "values_not_known": result.guessed,
        "advice": [{"change": item.changes, "peak_memory_gb": item.peak / GIB} for item in advice],
        "seconds": round(result.seconds, 1),
    }


def collective_objects(result: "Result") -> list[dict[str, Any]]:
    """Return the collectives of the step as JSON objects, sorted by decreasing bytes."""
    by_bytes = sorted(result.collectives.items(), key=lambda pair: -pair[1][1])
    objects = []
    for collective, (count, size) in by_bytes:
        entry = {
            "op": collective.op,
            "axis": collective.axis,
            "bytes": size,
            "count": count,
            "inside_node": collective.inside_node,
            "host": collective.host,
        }
        objects.append(entry)
    return objects


def host_sync_objects(result: "Result") -> list[dict[str, Any]]:
    """Return the host syncs of the step as JSON objects, the most frequent first."""
    by_count = sorted(result.syncs.items(), key=lambda pair: (-pair[1], pair[0].where))
    return [
        {"where": sync.where, "kind": sync.kind, "operator": sync.detail, "count": count} for sync, count in by_count
    ]


def kernel_objects(result: "Result") -> list[dict[str, Any]]:
    """Return the number of calls and the FLOPs of each kernel and dtype, as JSON objects."""
    kernels = summed(result, lambda kernel: replace(kernel, module="", phase=""))
    return [
        {"kernel": kernel.name, "dtype": kernel.dtype, "calls": calls, "flops": flops}
        for kernel, (calls, flops) in kernels
    ]


def matmul_objects(result: "Result") -> list[dict[str, Any]]:
    """Return the FLOPs of matmuls by module and phase, as JSON objects."""
    kernels = summed(result, lambda kernel: replace(kernel, name="", dtype=""))
    return [{"module": kernel.module, "phase": kernel.phase, "flops": flops} for kernel, (_, flops) in kernels if flops]


def expected_object(result: "Result", place: "Place") -> dict[str, Any] | None:
    """Return the predicted duration of each part of a step; None if the device file lacks the required figures."""
    from omnizoo.planning.time_model import CALIBRATION, counts_of, expect

    prediction = expect(counts_of(result, place.world), place.device)
    if prediction is None:
        return None
    seconds = {part: value for part, value in asdict(prediction).items() if part != "tokens"}
    peak_flops = place.device.bf16_tflops * 1e12 * place.world
    return {
        "prediction": str(CALIBRATION),
        "tokens_per_second_per_device": prediction.tokens_per_second,
        "seconds_per_step": prediction.seconds,
        "seconds": seconds,
        "mfu": result.flops / prediction.seconds / peak_flops,
        "operators": result.launched,
        "bytes_moved": result.moved,
    }


def save_seconds(size: int, place: "Place") -> float:
    """Return the seconds to write a checkpoint of `size` bytes. All nodes write their shards in parallel."""
    num_nodes = math.ceil(place.world / place.device.per_node)
    return size / 1e9 / (place.device.save_gb_per_s * num_nodes)


def summed(result: "Result", group: "Callable[[Kernel], Kernel]") -> list[tuple["Kernel", tuple[int, int]]]:
    """Return the number of calls and the FLOPs of each group of kernels, sorted by decreasing FLOPs.

    Args:
        result: The simulated step.
        group: Maps a kernel to its group: a `Kernel` without the fields that the group ignores.
    """
    calls: Counter[Kernel] = Counter()
    flops: Counter[Kernel] = Counter()
    for kernel, (num_calls, num_flops) in result.kernels.items():
        calls[group(kernel)] += num_calls
        flops[group(kernel)] += num_flops
    totals = [(kernel, (calls[kernel], flops[kernel])) for kernel in calls]
    return sorted(totals, key=lambda pair: (-pair[1][1], -pair[1][0]))


def show(plan: dict[str, Any], result: "Result", place: "Place", device: str) -> None:
    """Print the figures of a plan as tables, and the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    plural = "" if result.micro_batches == 1 else "es"
    console.print(
        f"{result.parameters / 1e9:,.2f} B parameters, rank {place.rank} of {place.world} ({result.layout}), "
        f"{result.tokens:,} tokens and {result.flops:.3g} FLOPs per step, "
        f"{result.micro_batches} micro-batch{plural} per rank",
    )
    console.print(f"recompute: {result.recompute}", markup=False)
    console.print(f"data: {result.data}\n", markup=False)
    console.print(memory_table(plan))
    peak = plan["peak_at"]
    console.print(f"the peak is in {peak['phase']} of {peak['module']}", markup=False)
    for table in (traffic_table, kernel_table, matmul_table, host_sync_table):
        console.print()
        console.print(table(plan))
    if plan["expected"] is not None:
        console.print()
        show_speed(plan["expected"], console)
    show_verdict(plan, place, device, console)


def memory_table(plan: dict[str, Any]) -> Table:
    """Return a table of peak memory by category, with the modules that have the most activations."""
    table = Table("memory at the peak", "GiB", box=None)
    for part, size in plan["memory"].items():
        table.add_row(part.replace("_", " "), f"{size:,.2f}")
        if part == "activations":
            for module, module_size in list(plan["activations"].items())[:MAX_MODULES]:
                table.add_row(f"  [dim]{module}[/]", f"[dim]{module_size:,.2f}[/]")
    table.add_row("total", f"{plan['peak_memory_gb']:,.2f}")
    if plan["host_memory_gb"]:
        table.add_row("CPU offload, per rank", f"{plan['host_memory_gb']:,.2f}")
    return table


def traffic_table(plan: dict[str, Any]) -> Table:
    """Return a table of the collectives, with the total size of this rank's inputs."""
    table = Table("collective", "axis", "calls", "input per rank, MiB", "reach", box=None)
    for entry in plan["collectives"]:
        reach = "within a node" if entry["inside_node"] else "across nodes"
        if entry["host"]:
            reach += ", CPU"
        table.add_row(entry["op"], entry["axis"], f"{entry['count']:,}", f"{entry['bytes'] / 2**20:,.1f}", reach)
    return table


def kernel_table(plan: dict[str, Any]) -> Table:
    """Return a table of the kernels that compute matmuls and attention."""
    table = Table("kernel (matmul, attention)", "dtype", "calls", "TFLOPs per rank", box=None)
    for entry in plan["kernels"]:
        flops = f"{entry['flops'] / 1e12:,.2f}" if entry["flops"] else ""
        table.add_row(entry["kernel"], entry["dtype"], f"{entry['calls']:,}", flops)
    return table


def matmul_table(plan: dict[str, Any]) -> Table:
    """Return a table of the modules whose matmuls have the most FLOPs, with columns for forward and backward."""
    by_module: dict[str, dict[str, float]] = {}
    for entry in plan["matmul_flops"]:
        by_module.setdefault(entry["module"], {})[entry["phase"]] = entry["flops"] / 1e12
    table = Table("matmuls by module", "TFLOPs forward", "TFLOPs backward", box=None)
    for module, tflops in list(by_module.items())[:MAX_MODULES]:
        table.add_row(module, f"{tflops.get('forward', 0):,.2f}", f"{tflops.get('backward', 0):,.2f}")
    return table


def host_sync_table(plan: dict[str, Any]) -> Table:
    """Return a table of the lines of code that cause host syncs."""
    table = Table("host sync at", "cause", "per step", box=None)
    for entry in plan["host_syncs"]:
        table.add_row(entry["where"], f"{entry['kind']}: {entry['operator']}", f"{entry['count']:,}")
    return table


def show_speed(expected: dict[str, Any], console: Console) -> None:
    """Print the predicted duration of each part of a step, and the speed."""
    table = Table("predicted time of a step", "s", "share", box=None)
    for part, seconds in expected["seconds"].items():
        table.add_row(PARTS_OF_A_STEP[part], f"{seconds:,.3f}", f"{seconds / expected['seconds_per_step']:.0%}")
    table.add_row("total", f"{expected['seconds_per_step']:,.3f}")
    console.print(table)
    speed = f"{expected['tokens_per_second_per_device']:,.0f} tokens/s per device, MFU {expected['mfu']:.1%}"
    console.print(f"predicted: {speed} ({expected['prediction']})")


def show_verdict(plan: dict[str, Any], place: "Place", device: str, console: Console) -> None:
    """Print the checkpoint size, whether the step fits into memory, and changes that would make it fit."""
    checkpoint = plan["checkpoint"]
    speed = f"{checkpoint['seconds']:,.1f} s to write at {place.device.save_gb_per_s:g} GB/s per node"
    console.print(f"\ncheckpoint: {checkpoint['gb']:,.2f} GiB, {speed}")
    verdict = "fits into" if plan["fits"] else "does not fit into"
    allowed = place.device.memory_gb * (1 - plan["margin"])
    limit = f"{device}: {place.device.memory_gb:g} GiB minus a margin of {plan['margin']:.0%}"
    console.print(f"\n{plan['peak_memory_gb']:,.1f} GiB: {verdict} {allowed:,.1f} GiB ({limit})")
    for advice in plan["advice"]:
        changes = ", ".join(f"{key}: {str(value).lower()}" for key, value in advice["change"].items())
        console.print(f"  with {changes}: {advice['peak_memory_gb']:,.1f} GiB")
    if not plan["fits"] and not plan["advice"]:
        console.print("  no tested change of the sections `parallel` and `train` saves memory")
    console.print(f"[dim]planned in {plan['seconds']:.0f} s[/]")
