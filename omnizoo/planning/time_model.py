"""Predict the duration of a step: divide the counts of a dry run by the speed of the device and its links.

The model is a roofline with separate parts. The time of matmuls and attention follows from their FLOPs. The time of
other operators follows from the bytes that they read and write, and the time of collectives from the bytes that they
send. The sends of ring attention overlap with attention. All-to-alls do not overlap. FSDP's all-gathers and
reduce-scatters are added in full, although they overlap with computation, because published runs have other overheads
of about the same size.

Nothing is measured on a device. benchmarks/calibrate.py fits three fractions of the data-sheet speeds to published
runs, and reports the error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omnizoo.planning.devices import Device
from omnizoo.planning.dry_run import Result
from omnizoo.planning.memory_tracker import BACKWARD, FORWARD
from omnizoo.planning.op_counter import ATTENTION
from omnizoo.planning.traffic import Collective

# Ratio of backward to forward FLOPs of flash attention. Backward has five matmuls and forward two, because backward
# recomputes the attention logits.
FLASH_BACKWARD = 2.5
LAUNCH = 8e-6  # approximate time in which the host launches an operator, in seconds
SYNC = 5e-5  # approximate time that the device is idle after a host sync, in seconds
MEMORY = 0.8  # approximate fraction of the memory bandwidth that operators reach
HALF = ("bfloat16", "float16")  # dtypes whose matmuls run at the speed of bf16
FSDP_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


@dataclass(frozen=True)
class Shares:
    """Fractions of the peak speeds in data sheets that are achieved in practice."""

    matmuls: float
    attention: float
    links: float


@dataclass(frozen=True)
class Calibration:
    """Fractions that were fitted to published runs, and the error of the predictions."""

    shares: Shares
    runs: int  # number of published runs
    error: float  # mean of |predicted / published - 1| of tokens/s, for models held out from the fit
    worst: float  # maximum of |predicted / published - 1|

    def __str__(self) -> str:
        return (
            f"calibrated on {self.runs} published runs of dense models, error {self.error:.0%}, worst {self.worst:.0%}"
        )


# Output of benchmarks/calibrate.py. The fraction for matmuls is high, because the published runs read and wrote fewer
# bytes of memory than OmniZoo does.
CALIBRATION = Calibration(Shares(matmuls=0.85, attention=0.34, links=0.77), runs=20, error=0.05, worst=0.17)


@dataclass(frozen=True)
class Counts:
    """Counts of one rank in one step."""

    matmuls: Mapping[str, float]  # FLOPs by dtype
    attention: float  # FLOPs, including recomputation
    moved: float  # bytes that other operators read and write
    sent: Mapping[Collective, float]  # bytes of this rank's inputs to collectives
    launched: int  # number of launched operators
    syncs: int  # number of host syncs
    tokens: float


@dataclass(frozen=True)
class Expected:
    """Predicted seconds of each part of a step. They add up to `seconds`."""

    matmuls: float
    attention: float
    memory: float  # memory-bound operators
    weights: float  # all-gathers of weights and reductions of gradients
    exchanges: float  # all-to-alls, and ring sends that do not overlap with attention
    host: float  # host syncs, and time in which the device waits for the host to launch operators
    tokens: float  # tokens of a step per device; not a time

    @property
    def seconds(self) -> float:
        """Predicted duration of a step."""
        return self.matmuls + self.attention + self.memory + self.weights + self.exchanges + self.host

    @property
    def tokens_per_second(self) -> float:
        """Predicted speed per device."""
        return self.tokens / self.seconds


def expect(counts: Counts, device: Device, shares: Shares = CALIBRATION.shares) -> Expected | None:
    """Predict the duration of a step.

    Args:
        counts: Counts of a rank from a dry run.
        device: The accelerator.
        shares: Fractions of the peak speeds that are achieved.

    Returns:
        The prediction; None if a speed of the device is unknown.
    """
    needed = (device.bf16_tflops, device.fp32_tflops, device.memory_gb_per_s, device.inside_gb_per_s)
    if not all((*needed, device.across_gb_per_s)):
        return None
    half_flops = device.bf16_tflops * 1e12
    single_flops = device.fp32_tflops * 1e12
    ideal_matmuls = 0.0
    for dtype, flops in counts.matmuls.items():
        ideal_matmuls += flops / (half_flops if dtype in HALF else single_flops)
    matmuls = ideal_matmuls / shares.matmuls
    attention = counts.attention / half_flops / shares.attention
    memory = counts.moved / (device.memory_gb_per_s * 1e9 * MEMORY)

    def collective_seconds(ops: Iterable[str]) -> float:
        """Return the total seconds of the collectives on the device whose operation is in `ops`."""
        seconds = 0.0
        for collective, size in counts.sent.items():
            if collective.op in ops and not collective.host:
                seconds += seconds_of(collective, size, device)
        return seconds / shares.links

    computation = matmuls + attention + memory
    weights = collective_seconds(FSDP_COLLECTIVES)
    exposed_sends = max(0.0, collective_seconds(("send",)) - attention)
    exchanges = collective_seconds(("all-to-all", "broadcast")) + exposed_sends
    launch_delay = max(0.0, counts.launched * LAUNCH - computation - weights - exchanges)
    return Expected(
        matmuls=matmuls,
        attention=attention,
        memory=memory,
        weights=weights,
        exchanges=exchanges,
        host=counts.syncs * SYNC + launch_delay,
        tokens=counts.tokens,
    )


def seconds_of(collective: Collective, input_bytes: float, device: Device) -> float:
    """Return the seconds of collectives with a total input of `input_bytes`, at the full speed of the links.

    All-gathers and reductions across nodes use the links of all devices of a node that take part.
    """
    ranks = collective.ranks
    ranks_in_node = collective.in_a_node
    inside = device.inside_gb_per_s * 1e9
    across = device.across_gb_per_s * 1e9
    if ranks == 1:
        return 0.0
    if collective.op == "all-to-all":
        return input_bytes * ((ranks_in_node - 1) / inside + (ranks - ranks_in_node) / across) / ranks
    if collective.op in ("send", "broadcast"):
        return input_bytes / (inside if collective.inside_node else across)
    speed = inside if collective.inside_node else min(inside, ranks_in_node * across)
    received = {"all-gather": ranks - 1, "reduce-scatter": (ranks - 1) / ranks, "all-reduce": 2 * (ranks - 1) / ranks}
    return input_bytes * received[collective.op] / speed


def counts_of(result: Result, world: int) -> Counts:
    """Return the counts of one rank from the result of a dry run."""
    matmuls: dict[str, float] = {}
    # Calls of forward attention kernels by phase. Calls in the backward phase are recomputation.
    forward_calls = {FORWARD: 0, BACKWARD: 0}
    for kernel, (count, flops) in result.kernels.items():
        if flops:
            matmuls[kernel.dtype] = matmuls.get(kernel.dtype, 0) + flops
            continue
        is_attention = any(part in kernel.name for part in ATTENTION)
        is_forward_kernel = is_attention and "backward" not in kernel.name
        if is_forward_kernel and kernel.phase in forward_calls:
            forward_calls[kernel.phase] += count
    recomputed = 0.0  # recomputed fraction of the forward pass of attention
    if forward_calls[FORWARD]:
        recomputed = forward_calls[BACKWARD] / forward_calls[FORWARD]
    forward = result.attention / 3 / world  # `result.attention` includes a backward pass with twice the forward FLOPs
    return Counts(
        matmuls=matmuls,
        attention=forward * (1 + recomputed + FLASH_BACKWARD),
        moved=result.moved,
        sent={collective: size for collective, (_, size) in result.collectives.items()},
        launched=result.launched,
        syncs=sum(result.syncs.values()),
        tokens=result.tokens / world,
    )
