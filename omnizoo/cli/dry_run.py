"""`omnizoo plan`: will it fit, what is sent, where does the host wait; before any device is rented."""

import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.parallel.layout import micro_batches, plan_layout
from omnizoo.planning.devices import read_device

if TYPE_CHECKING:
    from omnizoo.planning.advise import Advice
    from omnizoo.planning.simulate import Place, Result
    from omnizoo.planning.work import Kernel

MOST_RANKS = 2**16
GIB = 2**30
PARTS_OF_A_STEP = {
    "matmuls": "matmuls",
    "attention": "attention",
    "memory": "other operators, by bytes of memory",
    "weights": "weights and gradients on their way",
    "exchanges": "exchanges of tokens and keys that are waited for",
    "host": "waiting for the host",
}
SHOWN = 8  # modules, by what their activations take


def plan(
    path: str,
    overrides: list[str],
    world: int,
    device: str,
    rank: int,
    imbalance: float,
    as_json: bool,
    html: Path | None,
) -> int:
    """0 if the step fits the device, 1 if it does not."""
    if not 1 <= world <= MOST_RANKS:
        raise UserError(f"--world is {world}; expected 1 to {MOST_RANKS} ranks")
    if not 0 <= rank < world:
        raise UserError(f"--rank is {rank}; expected 0 to {world - 1}, of a world of {world}")
    if not 0 < imbalance <= world:
        raise UserError(f"--imbalance is {imbalance:g}; expected a number above 0 and up to the {world} ranks")
    config = load_config(path, overrides, needs_data=False)
    chosen = read_device(device)
    layout = plan_layout(config.parallel, world)
    micro_batches(layout, config.train.global_batch, config.train.micro_batch)
    quiet()
    from omnizoo.planning.advise import advise, room
    from omnizoo.planning.simulate import Place, simulate

    place = Place(world, rank, chosen, imbalance)
    talk = Console(stderr=True, quiet=as_json)
    with talk.status("running the step without a device"):
        result = simulate(config, place)
    fits = result.peak.bytes <= room(place)
    advice: list[Advice] = []
    if not fits:
        with talk.status("it does not fit: trying what helps") as status:
            advice = advise(config, place, result, status.update)
    found = as_object(result, place, fits, advice)
    if as_json:
        print(json.dumps(found))
    else:
        show(found, result, place, device)
    if html is not None:
        from omnizoo.planning.page import write_page

        write_page(html, Path(path).stem, found, result.timeline)
    return 0 if fits else 1


def quiet() -> None:
    """What torch and transformers say about a world that is not there helps nobody."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def as_object(result: "Result", place: "Place", fits: bool, advice: "list[Advice]") -> dict[str, Any]:
    from omnizoo.planning.advise import MARGIN

    peak = result.peak
    return {
        "fits": fits,
        "peak_memory_gb": peak.bytes / GIB,
        "peak_at": {"module": peak.module or "the loss", "phase": peak.phase},
        "device_memory_gb": place.device.memory_gb,
        "margin": MARGIN,
        "memory": {part.replace(" ", "_"): size / GIB for part, size in peak.parts.items()},
        "activations": {module: size / GIB for module, size in peak.activations.items()},
        "collectives": [
            {
                "op": each.op,
                "axis": each.axis,
                "bytes": size,
                "count": count,
                "inside_node": each.inside_node,
                "host": each.host,
            }
            for each, (count, size) in sorted(result.collectives.items(), key=lambda pair: -pair[1][1])
        ],
        "host_syncs": [
            {"where": sync.where, "kind": sync.kind, "operator": sync.detail, "count": count}
            for sync, count in sorted(result.syncs.items(), key=lambda pair: (-pair[1], pair[0].where))
        ],
        "flops_per_step": result.flops,
        "expected": expected_object(result, place),
        "kernels": [
            {"kernel": kernel.name, "dtype": kernel.dtype, "calls": calls, "flops": flops}
            for kernel, (calls, flops) in summed(result, lambda kernel: replace(kernel, module="", phase=""))
        ],
        "matmul_flops": [
            {"module": kernel.module, "phase": kernel.phase, "flops": flops}
            for kernel, (_, flops) in summed(result, lambda kernel: replace(kernel, name="", dtype=""))
            if flops
        ],
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
        "advice": [{"change": each.changes, "peak_memory_gb": each.peak / GIB} for each in advice],
        "seconds": round(result.seconds, 1),
    }


def expected_object(result: "Result", place: "Place") -> dict[str, Any] | None:
    """How fast the step should be, by part; None if the device's file has no figures for it."""
    from omnizoo.planning.expected import CALIBRATION, counts_of, expect

    found = expect(counts_of(result, place.world), place.device)
    if found is None:
        return None
    seconds = {part: value for part, value in asdict(found).items() if part != "tokens"}
    peak = place.device.bf16_tflops * 1e12 * place.world
    return {
        "prediction": str(CALIBRATION),
        "tokens_per_second_per_device": found.tokens_per_second,
        "seconds_per_step": found.seconds,
        "seconds": seconds,
        "mfu": result.flops / found.seconds / peak,
        "operators": result.launched,
        "bytes_moved": result.moved,
    }


def save_seconds(size: int, place: "Place") -> float:
    """How long a checkpoint of that many bytes takes to be written: all nodes write their part at once."""
    nodes = -(-place.world // place.device.per_node)
    return size / 1e9 / (place.device.save_gb_per_s * nodes)


def summed(result: "Result", kind: "Callable[[Kernel], Kernel]") -> list[tuple["Kernel", tuple[int, int]]]:
    """Calls and FLOPs of kernels of one kind together, the most FLOPs first."""
    calls: Counter[Kernel] = Counter()
    flops: Counter[Kernel] = Counter()
    for kernel, (count, size) in result.kernels.items():
        calls[kind(kernel)] += count
        flops[kind(kernel)] += size
    return sorted(((each, (calls[each], flops[each])) for each in calls), key=lambda pair: (-pair[1][1], -pair[1][0]))


def show(found: dict[str, Any], result: "Result", place: "Place", device: str) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    allowed = place.device.memory_gb * (1 - found["margin"])
    console.print(
        f"{result.parameters / 1e9:,.2f} B parameters, rank {place.rank} of {place.world} ({result.layout}), "
        f"{result.tokens:,} tokens and {result.flops:.3g} FLOPs per step, "
        f"{result.micro_batches} micro-batch(es) per rank",
        highlight=False,
    )
    console.print(f"recompute: {result.recompute}", highlight=False, markup=False)
    console.print(f"data: {result.data}\n", highlight=False, markup=False)

    memory = Table("memory at the peak", "GiB", box=None)
    for part, size in found["memory"].items():
        memory.add_row(part.replace("_", " "), f"{size:,.2f}")
        if part == "activations":
            for module, own in list(found["activations"].items())[:SHOWN]:
                memory.add_row(f"  [dim]{module}[/]", f"[dim]{own:,.2f}[/]")
    memory.add_row("together", f"{found['peak_memory_gb']:,.2f}")
    if result.host:
        memory.add_row("on the host, per rank", f"{result.host / GIB:,.2f}")
    console.print(memory)
    at = found["peak_at"]
    console.print(f"the peak is in the {at['phase']} of {at['module']}\n", highlight=False, markup=False)

    traffic = Table("collective", "axis", "calls", "MiB put in by this rank", "reach", box=None)
    for each in found["collectives"]:
        reach = ("inside a node" if each["inside_node"] else "across nodes") + (", host" if each["host"] else "")
        traffic.add_row(each["op"], each["axis"], f"{each['count']:,}", f"{each['bytes'] / 2**20:,.1f}", reach)
    console.print(traffic)
    console.print()
    kernels = Table("kernels of matmuls and attention", "in", "calls", "TFLOPs of this rank", box=None)
    for each in found["kernels"]:
        size = f"{each['flops'] / 1e12:,.2f}" if each["flops"] else ""
        kernels.add_row(each["kernel"], each["dtype"], f"{each['calls']:,}", size)
    console.print(kernels)
    console.print()
    parts = Table("matmuls of", "TFLOPs forward", "backward", box=None)
    for module in list(dict.fromkeys(each["module"] for each in found["matmul_flops"]))[:SHOWN]:
        own = {each["phase"]: each["flops"] / 1e12 for each in found["matmul_flops"] if each["module"] == module}
        parts.add_row(module, *(f"{own.get(phase, 0):,.2f}" for phase in ("forward", "backward")))
    console.print(parts)
    console.print()
    waits = Table("the host waits for the device in", "for", "times a step", box=None)
    for each in found["host_syncs"]:
        waits.add_row(each["where"], f"{each['kind']}: {each['operator']}", f"{each['count']:,}")
    console.print(waits)

    if (expected := found["expected"]) is not None:
        console.print()
        parts = Table("expected: seconds of a step", "s", "share", box=None)
        for part, seconds in expected["seconds"].items():
            parts.add_row(PARTS_OF_A_STEP[part], f"{seconds:,.3f}", f"{seconds / expected['seconds_per_step']:.0%}")
        parts.add_row("together", f"{expected['seconds_per_step']:,.3f}")
        console.print(parts)
        speed = f"{expected['tokens_per_second_per_device']:,.0f} tokens/s per device, MFU {expected['mfu']:.1%}"
        console.print(f"{speed}: a prediction, {expected['prediction']}", highlight=False)

    saved = found["checkpoint"]
    speed = f"{saved['seconds']:,.1f} s to write at {place.device.save_gb_per_s:g} GB/s a node"
    console.print(f"\ncheckpoint: {saved['gb']:,.2f} GiB, {speed}", highlight=False)
    verdict = "fits" if found["fits"] else "does not fit"
    of = f"{device}: {place.device.memory_gb:g} GiB less a margin of {found['margin']:.0%}"
    console.print(f"\n{found['peak_memory_gb']:,.1f} GiB: {verdict} {allowed:,.1f} GiB ({of})", highlight=False)
    for advice in found["advice"]:
        changes = ", ".join(f"{key}: {str(value).lower()}" for key, value in advice["change"].items())
        console.print(f"  with {changes}: {advice['peak_memory_gb']:,.1f} GiB", highlight=False)
    if not found["fits"] and not found["advice"]:
        console.print("  no change of `parallel` that was tried helps")
    console.print(f"[dim]{found['seconds']:.0f} s[/]", highlight=False)
