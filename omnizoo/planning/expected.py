"""How fast a step is expected to be: what a plan counts, divided by what a device and its links can do.

A roofline with parts that can be told apart: matmuls and attention by FLOPs, all other operators by bytes of memory,
and what is sent by bytes of links. Keys and values of a ring travel beside attention. All-to-alls are waited for, and
what FSDP gathers and reduces is added too: it travels beside the computation, but published runs are longer by about as
much. It is a prediction: nothing is measured on a device. Three shares of data sheets are fitted to published runs by
benchmarks/calibrate.py, which also says how far it is off.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omnizoo.planning.devices import Device
from omnizoo.planning.ledger import BACKWARD, FORWARD
from omnizoo.planning.simulate import Result
from omnizoo.planning.traffic import Collective
from omnizoo.planning.work import ATTENTION

FLASH_BACKWARD = 2.5  # FLOPs of it / of forward: scores are computed once more, so five products instead of two
LAUNCH = 8e-6  # seconds that the host takes for an operator: rough
SYNC = 5e-5  # seconds that the device has nothing to do when the host has waited for it: rough
MEMORY = 0.8  # of the bandwidth of memory that plain operators reach: rough
HALF = ("bfloat16", "float16")
OF_WEIGHTS = ("all-gather", "reduce-scatter", "all-reduce")  # FSDP's


@dataclass(frozen=True)
class Shares:
    """What is reached of data sheets."""

    matmuls: float
    attention: float
    links: float


@dataclass(frozen=True)
class Calibration:
    shares: Shares
    runs: int
    error: float  # mean of |predicted / published - 1| of tokens/s, of a model that was not fitted
    worst: float

    def __str__(self) -> str:
        return (
            f"calibrated on {self.runs} published runs of dense models, error {self.error:.0%}, worst {self.worst:.0%}"
        )


# Of benchmarks/calibrate.py. The share in matmuls is high, since the published runs moved fewer bytes than ours do.
CALIBRATION = Calibration(Shares(matmuls=0.85, attention=0.34, links=0.77), runs=20, error=0.05, worst=0.17)


@dataclass(frozen=True)
class Counts:
    """Of one rank, in one step."""

    matmuls: Mapping[str, float]  # FLOPs by dtype
    attention: float  # FLOPs, with what is computed again
    moved: float  # bytes
    sent: Mapping[Collective, float]  # bytes that this rank puts in
    launched: int
    syncs: int
    tokens: float


@dataclass(frozen=True)
class Expected:
    """Seconds of a step by part. They add up to `seconds`."""

    matmuls: float
    attention: float
    memory: float  # operators that are bound by memory
    weights: float  # gathering them and reducing gradients
    exchanges: float  # all-to-alls, and rings as far as attention does not hide them
    host: float  # waits, and operators that the device is done with before the host has started the next one
    tokens: float  # of a step, per device

    @property
    def seconds(self) -> float:
        return self.matmuls + self.attention + self.memory + self.weights + self.exchanges + self.host

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def expect(counts: Counts, device: Device, shares: Shares = CALIBRATION.shares) -> Expected | None:
    """None if the device has no figures to divide by."""
    needed = (device.bf16_tflops, device.fp32_tflops, device.memory_gb_per_s, device.inside_gb_per_s)
    if not all((*needed, device.across_gb_per_s)):
        return None
    half, single = device.bf16_tflops * 1e12, device.fp32_tflops * 1e12
    ideal = sum(flops / (half if dtype in HALF else single) for dtype, flops in counts.matmuls.items())
    matmuls, attention = ideal / shares.matmuls, counts.attention / half / shares.attention
    memory = counts.moved / (device.memory_gb_per_s * 1e9 * MEMORY)

    def on_the_way(ops: Iterable[str]) -> float:
        chosen = ((each, size) for each, size in counts.sent.items() if each.op in ops and not each.host)
        return sum(seconds_of(each, size, device) for each, size in chosen) / shares.links

    computing = matmuls + attention + memory
    weights = on_the_way(OF_WEIGHTS)
    exchanges = on_the_way(("all-to-all", "broadcast")) + max(0.0, on_the_way(("send",)) - attention)
    host = counts.syncs * SYNC + max(0.0, counts.launched * LAUNCH - computing - weights - exchanges)
    return Expected(matmuls, attention, memory, weights, exchanges, host, counts.tokens)


def seconds_of(collective: Collective, put_in: float, device: Device) -> float:
    """At the full speed of links. Devices of a node share the way out of it, and gather and reduce by all of it."""
    ranks, near = collective.ranks, collective.in_a_node
    inside, across = device.inside_gb_per_s * 1e9, device.across_gb_per_s * 1e9
    if ranks == 1:
        return 0.0
    if collective.op == "all-to-all":
        return put_in * ((near - 1) / inside + (ranks - near) / across) / ranks
    speed = inside if collective.inside_node else min(inside, near * across)
    if collective.op in ("send", "broadcast"):
        return put_in / (inside if collective.inside_node else across)
    received = {"all-gather": ranks - 1, "reduce-scatter": (ranks - 1) / ranks, "all-reduce": 2 * (ranks - 1) / ranks}
    return put_in * received[collective.op] / speed


def counts_of(result: Result, world: int) -> Counts:
    matmuls: dict[str, float] = {}
    calls = {FORWARD: 0, BACKWARD: 0}  # of forward kernels of attention, in each phase
    for kernel, (count, flops) in result.kernels.items():
        if flops:
            matmuls[kernel.dtype] = matmuls.get(kernel.dtype, 0) + flops
        elif any(part in kernel.name for part in ATTENTION) and "backward" not in kernel.name and kernel.phase in calls:
            calls[kernel.phase] += count
    again = calls[BACKWARD] / calls[FORWARD] if calls[FORWARD] else 0.0
    forward = result.attention / 3 / world  # which counts backward as twice forward
    return Counts(
        matmuls=matmuls,
        attention=forward * (1 + again + FLASH_BACKWARD),
        moved=result.moved,
        sent={each: size for each, (_, size) in result.collectives.items()},
        launched=result.launched,
        syncs=sum(result.syncs.values()),
        tokens=result.tokens / world,
    )
