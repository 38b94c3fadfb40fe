"""What ranks hand to each other: rows of tensors by one all-to-all with gradients, arrays on the host, small summaries.

Nothing is pickled: arrays travel as their bytes, all that describes them as JSON.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

ProcessGroup = dist.ProcessGroup
Counts = Sequence[Sequence[int]]  # of each table, the rows for or from each rank
Payload = tuple[dict[str, Any], Mapping[str, torch.Tensor | npt.NDArray[Any]]]  # a JSON-able header, and arrays
Received = tuple[dict[str, Any], dict[str, torch.Tensor]]

ALIGNED = 16  # bytes: arrays are used where they arrive, which no dtype allows at odd places
POLL = 0.0005  # seconds


def group_of_thread() -> dist.ProcessGroup:
    """All ranks once more, over gloo, for one thread of each: what other threads send cannot come in between."""
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Of `rows`, the first `sent[0]` go to rank 0 and so on; what comes is ordered by rank. Gradients go back alike."""
    return exchange_tables([rows], [sent], [received], group)[0]


def exchange_tables(
    tables: Sequence[torch.Tensor], sent: Counts, received: Counts, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    """`exchange_rows` of several tables, of any widths and dtypes, by a single all-to-all; one more in backward.

    All ranks must call it, and reach what it returned in backward, also those that neither give nor get a row.
    """
    out: tuple[torch.Tensor, ...] = _Exchange.apply(sent, received, group, *tables)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sent: Counts, received: Counts, group: dist.ProcessGroup | None, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = _all_to_all(tables, sent, received, group)
        ctx.mark_non_differentiable(*(t for t, needed in zip(out, ctx.needs_input_grad[3:], strict=True) if not needed))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]  # the same on all ranks
        sent, received = [ctx.received[i] for i in wanted], [ctx.sent[i] for i in wanted]
        back = _all_to_all([grads[i] for i in wanted], sent, received, ctx.group)
        by_table = dict(zip(wanted, back, strict=True))
        return None, None, None, *(by_table.get(i) for i in range(len(grads)))


def _all_to_all(
    tables: Sequence[torch.Tensor], sent: Counts, received: Counts, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    if len(tables) == 1:
        (table,) = tables
        out = table.new_empty(sum(received[0]), *table.shape[1:])
        dist.all_to_all_single(out, table.contiguous(), list(received[0]), list(sent[0]), group=group)
        return (out,)
    # Each rank gets its rows of the first table, then of the second, ... Most ranks get nothing from most others, so
    # only the pieces that exist are handled one by one.
    widths = np.array([math.prod(table.shape[1:]) * table.element_size() for table in tables])
    giving, getting = np.array(sent), np.array(received)
    flat = [table.contiguous().view(torch.uint8).flatten() for table in tables]
    pieces = [iter(f.split((n[n > 0] * w).tolist())) for f, n, w in zip(flat, giving, widths, strict=True)]
    out = flat[0].new_empty(int(widths @ getting.sum(1)))
    buffer = torch.cat([out[:0], *(next(pieces[table]) for _, table in np.argwhere(giving.T))])
    dist.all_to_all_single(out, buffer, (widths @ getting).tolist(), (widths @ giving).tolist(), group=group)

    arrived: list[list[torch.Tensor]] = [[out[:0]] for _ in tables]
    order = np.argwhere(getting.T)
    lengths = [int(getting[table, rank] * widths[table]) for rank, table in order]
    for (_, table), piece in zip(order, out.split(lengths), strict=True):
        arrived[table].append(piece)
    return tuple(
        torch.cat(parts).view(table.dtype).view(-1, *table.shape[1:])
        for table, parts in zip(tables, arrived, strict=True)
    )


def exchange_payloads(to: Sequence[Sequence[Payload]], group: dist.ProcessGroup | None = None) -> list[list[Received]]:
    """`to[rank]` is for that rank; returns what each rank had for this one. On the host, whatever the device."""
    rank = dist.get_rank(group)
    own: list[Received] = [(json.loads(json.dumps(header)), _host(arrays)) for header, arrays in to[rank]]
    if len(to) == 1:
        return [own]
    buffers = [_pack(payloads) if i != rank and payloads else _NOTHING for i, payloads in enumerate(to)]
    sent = torch.tensor([len(buffer) for buffer in buffers])
    received = torch.empty_like(sent)
    _finish(dist.all_to_all_single(received, sent, group=group, async_op=True), group)
    out, all_sent = torch.empty(int(received.sum()), dtype=torch.uint8), torch.cat(buffers)
    sizes = received.tolist(), sent.tolist()
    _finish(dist.all_to_all_single(out, all_sent, *sizes, group=group, async_op=True), group)
    arrived = [_unpack(buffer) for buffer in out.split(received.tolist())]
    return [*arrived[:rank], own, *arrived[rank + 1 :]]


def gather_bytes(message: bytes, group: ProcessGroup | None = None) -> list[npt.NDArray[np.uint8]]:
    """Each rank's message, on all ranks; each begins where any dtype may."""
    text = torch.from_numpy(np.frombuffer(bytearray(message), np.uint8))
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64)
    _finish(dist.all_gather_single(sizes, torch.tensor([len(text)]), group=group, async_op=True), group)
    longest = int(sizes.max())
    own = torch.zeros(longest + -longest % ALIGNED, dtype=torch.uint8)  # gloo gathers equal sizes only
    own[: len(text)] = text
    out = own.new_empty(ranks * len(own))
    _finish(dist.all_gather_single(out, own, group=group, async_op=True), group)
    return [row[:size] for row, size in zip(out.view(ranks, -1).numpy(), sizes.tolist(), strict=True)]


def _finish(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective. In the group of a thread (None: that of all) the wait is in Python: a thread that waits
    inside of torch while Python ends (3.11) would abort the process."""
    while group is not None and not work.is_completed():
        time.sleep(POLL)
    work.wait()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _pack(payloads: Sequence[Payload]) -> torch.Tensor:
    """The length of what describes them, that, and their arrays, each at a multiple of ALIGNED."""
    hosted = [(header, _host(arrays)) for header, arrays in payloads]
    text = _bytes(
        [
            (header, [(name, str(array.dtype).removeprefix("torch."), array.shape) for name, array in arrays.items()])
            for header, arrays in hosted
        ]
    )
    arrays = [array.flatten().view(torch.uint8) for _, named in hosted for array in named.values()]
    pieces = [torch.tensor([len(text)]).view(torch.uint8), text, *arrays]
    return torch.cat(
        [part for piece in pieces for part in (piece, torch.zeros(-len(piece) % ALIGNED, dtype=torch.uint8))]
    )


def _unpack(buffer: torch.Tensor) -> list[Received]:
    if not len(buffer):
        return []
    at = 0

    def take(size: int) -> torch.Tensor:
        nonlocal at
        at, first = at + size + -size % ALIGNED, at
        return buffer[first : first + size]

    described = json.loads(take(int(take(8).view(torch.int64))).numpy().tobytes())
    payloads = []
    for header, arrays in described:
        named = {}
        for name, dtype, shape in arrays:
            kind = getattr(torch, dtype)
            named[name] = take(math.prod(shape) * kind.itemsize).view(kind).view(shape)
        payloads.append((header, named))
    return payloads


def _host(arrays: Mapping[str, torch.Tensor | npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(array, device="cpu").detach().contiguous() for name, array in arrays.items()}


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
