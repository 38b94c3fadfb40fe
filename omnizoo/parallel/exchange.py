"""Exchange data between ranks: rows of tensors with gradients, arrays on the host, and short messages.

Nothing is pickled: arrays are sent as raw bytes, and their names, dtypes and shapes as JSON.
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

from omnizoo.parallel.traffic_tag import sent_along

ProcessGroup = dist.ProcessGroup
Counts = Sequence[Sequence[int]]  # [tables][ranks], number of rows
Payload = tuple[dict[str, Any], Mapping[str, torch.Tensor | npt.NDArray[Any]]]  # JSON-serializable header, arrays
Received = tuple[dict[str, Any], dict[str, torch.Tensor]]

ALIGNED = 16  # bytes; received arrays are views of the buffer, so their offsets must be aligned for every dtype
POLL = 0.0005  # seconds


def group_of_thread() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks for one thread per rank, so that its messages do not mix with others'.

    Collective: all ranks must call it.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None, axis: str
) -> torch.Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, and so on.

    Gradients take the reverse route. Collective: all ranks of `group` must call it.

    Args:
        rows: Rows to send, sorted by destination rank.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: Process group; None for all ranks.
        axis: Mesh axis of `group`.

    Returns:
        The received rows, sorted by source rank.
    """
    return exchange_tables([rows], [sent], [received], group, axis)[0]


def exchange_tables(
    tables: Sequence[torch.Tensor], sent: Counts, received: Counts, group: dist.ProcessGroup | None, axis: str
) -> tuple[torch.Tensor, ...]:
    """Like `exchange_rows` for several tables of any widths and dtypes, with one all-to-all in forward and in backward.

    Collective: all ranks of `group` must call it and run backward through its outputs, even if they send and receive no
    rows.
    """
    out: tuple[torch.Tensor, ...] = _Exchange.apply(sent, received, group, axis, *tables)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of several tables. Its backward is the reverse all-to-all of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, sent: Counts, received: Counts, group: dist.ProcessGroup | None, axis: str, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.sent, ctx.received, ctx.group, ctx.axis = sent, received, group, axis
        with sent_along(axis):
            out = _all_to_all(tables, sent, received, group)
        ctx.mark_non_differentiable(*(t for t, needed in zip(out, ctx.needs_input_grad[4:], strict=True) if not needed))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]  # must be equal on all ranks
        sent, received = [ctx.received[i] for i in wanted], [ctx.sent[i] for i in wanted]
        with sent_along(ctx.axis):
            back = _all_to_all([grads[i] for i in wanted], sent, received, ctx.group)
        by_table = dict(zip(wanted, back, strict=True))
        return None, None, None, None, *(by_table.get(i) for i in range(len(grads)))


def _all_to_all(
    tables: Sequence[torch.Tensor], sent: Counts, received: Counts, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, ...]:
    """Exchange the rows of all tables with a single all-to-all, without autograd."""
    if len(tables) == 1:
        (table,) = tables
        out = table.new_empty(sum(received[0]), *table.shape[1:])
        dist.all_to_all_single(out, table.contiguous(), list(received[0]), list(sent[0]), group=group)
        return (out,)
    # Each rank is sent its rows of the first table, then those of the second, and so on. Most pairs of ranks exchange
    # nothing, so only the non-empty pieces are handled individually.
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
    """Send the payloads `to[rank]` to each rank, and return the payloads received from each rank.

    Arrays are sent and received on the host. Collective: all ranks of `group` must call it.
    """
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


def gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[npt.NDArray[np.uint8]]:
    """Return the messages of all ranks. Each starts at an offset that is aligned for every dtype.

    Collective: all ranks of `group` must call it.
    """
    text = torch.from_numpy(np.frombuffer(bytearray(message), np.uint8))
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64)
    _finish(dist.all_gather_single(sizes, torch.tensor([len(text)]), group=group, async_op=True), group)
    longest = int(sizes.max())
    own = torch.zeros(longest + -longest % ALIGNED, dtype=torch.uint8)  # gloo's all-gather needs equal sizes
    own[: len(text)] = text
    out = own.new_empty(ranks * len(own))
    _finish(dist.all_gather_single(out, own, group=group, async_op=True), group)
    return [row[:size] for row, size in zip(out.view(ranks, -1).numpy(), sizes.tolist(), strict=True)]


def _finish(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective.

    In the group of a background thread (`group` is not None), poll from Python: a thread that waits inside torch while
    the interpreter shuts down (Python 3.11) would abort the process.
    """
    while group is not None and not work.is_completed():
        time.sleep(POLL)
    work.wait()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _pack(payloads: Sequence[Payload]) -> torch.Tensor:
    """Serialize payloads: length of the JSON description, the description, the arrays; each aligned to `ALIGNED`."""
    hosted = [(header, _host(arrays)) for header, arrays in payloads]
    described = [
        (header, [(name, str(array.dtype).removeprefix("torch."), array.shape) for name, array in arrays.items()])
        for header, arrays in hosted
    ]
    text = torch.frombuffer(bytearray(json.dumps(described), "utf-8"), dtype=torch.uint8)
    arrays = [array.flatten().view(torch.uint8) for _, named in hosted for array in named.values()]
    pieces = [torch.tensor([len(text)]).view(torch.uint8), text, *arrays]
    return torch.cat(
        [part for piece in pieces for part in (piece, torch.zeros(-len(piece) % ALIGNED, dtype=torch.uint8))]
    )


def _unpack(buffer: torch.Tensor) -> list[Received]:
    """Return the payloads in a buffer that `_pack` has written. Arrays are views of the buffer."""
    if not len(buffer):
        return []
    at = 0

    def take(size: int) -> torch.Tensor:
        """Return the next `size` bytes and skip the padding after them."""
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
    """Return the arrays as contiguous CPU tensors."""
    return {name: torch.as_tensor(array, device="cpu").detach().contiguous() for name, array in arrays.items()}
