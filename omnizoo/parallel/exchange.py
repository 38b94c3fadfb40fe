"""Exchange data between ranks: rows of tensors with gradients, arrays on the host, and short messages.

Nothing is pickled. Arrays are sent as raw bytes, and their names, dtypes and shapes are sent as JSON.
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

ALIGNMENT = 16  # bytes; received arrays are views of the buffer, so their offsets must be aligned for every dtype
POLL_SECONDS = 0.0005


def new_thread_group() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks. One thread per rank uses it exclusively, so that messages do not mix.

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
    """Exchange rows of several tables with one all-to-all in forward and one in backward. Widths and dtypes may differ.

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
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        ctx.axis = axis
        with sent_along(axis):
            out = _all_to_all(tables, sent, received, group)
        needs_grad = ctx.needs_input_grad[4:]
        ctx.mark_non_differentiable(*(table for table, needs in zip(out, needs_grad, strict=True) if not needs))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # This list must be equal on all ranks, because all of these gradients are sent in one all-to-all.
        trained = [i for i, needs in enumerate(ctx.needs_input_grad[4:]) if needs]
        sent = [ctx.received[i] for i in trained]
        received = [ctx.sent[i] for i in trained]
        with sent_along(ctx.axis):
            received_grads = _all_to_all([grads[i] for i in trained], sent, received, ctx.group)
        by_table = dict(zip(trained, received_grads, strict=True))
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
    # Each rank receives its rows of the first table, then its rows of the second table, and so on. Most pairs of ranks
    # exchange nothing, so only the non-empty pieces are handled individually.
    row_bytes = np.array([math.prod(table.shape[1:]) * table.element_size() for table in tables])
    sent_rows = np.array(sent)  # [tables, ranks]
    received_rows = np.array(received)  # [tables, ranks]

    flat_tables = [table.contiguous().view(torch.uint8).flatten() for table in tables]
    sent_pieces = []
    for flat, rows, size in zip(flat_tables, sent_rows, row_bytes, strict=True):
        piece_sizes = (rows[rows > 0] * size).tolist()
        sent_pieces.append(iter(flat.split(piece_sizes)))
    out = flat_tables[0].new_empty(int(row_bytes @ received_rows.sum(1)))
    buffer = torch.cat([out[:0], *(next(sent_pieces[table]) for _, table in np.argwhere(sent_rows.T))])
    received_bytes = (row_bytes @ received_rows).tolist()
    sent_bytes = (row_bytes @ sent_rows).tolist()
    dist.all_to_all_single(out, buffer, received_bytes, sent_bytes, group=group)

    received_pieces: list[list[torch.Tensor]] = [[out[:0]] for _ in tables]
    order = np.argwhere(received_rows.T)
    piece_sizes = [int(received_rows[table, rank] * row_bytes[table]) for rank, table in order]
    for (_, table), piece in zip(order, out.split(piece_sizes), strict=True):
        received_pieces[table].append(piece)
    return tuple(
        torch.cat(pieces).view(table.dtype).view(-1, *table.shape[1:])
        for table, pieces in zip(tables, received_pieces, strict=True)
    )


def exchange_payloads(
    payloads_by_rank: Sequence[Sequence[Payload]], group: dist.ProcessGroup | None = None
) -> list[list[Received]]:
    """Send the payloads `payloads_by_rank[rank]` to each rank, and return the payloads received from each rank.

    Arrays are sent and received on the host. Collective: all ranks of `group` must call it.
    """
    rank = dist.get_rank(group)
    local: list[Received] = []
    for header, arrays in payloads_by_rank[rank]:
        local.append((json.loads(json.dumps(header)), _to_host(arrays)))
    if len(payloads_by_rank) == 1:
        return [local]

    buffers = []
    for destination, payloads in enumerate(payloads_by_rank):
        buffers.append(_pack(payloads) if destination != rank and payloads else _EMPTY)
    sent_sizes = torch.tensor([len(buffer) for buffer in buffers])
    received_sizes = torch.empty_like(sent_sizes)
    _finish(dist.all_to_all_single(received_sizes, sent_sizes, group=group, async_op=True), group)

    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    sent = torch.cat(buffers)
    work = dist.all_to_all_single(
        received, sent, received_sizes.tolist(), sent_sizes.tolist(), group=group, async_op=True
    )
    _finish(work, group)
    result = [_unpack(buffer) for buffer in received.split(received_sizes.tolist())]
    result[rank] = local
    return result


def gather_bytes(message: bytes, group: dist.ProcessGroup | None = None) -> list[npt.NDArray[np.uint8]]:
    """Return the messages of all ranks. Each message starts at an offset that is aligned for every dtype.

    Collective: all ranks of `group` must call it.
    """
    content = torch.from_numpy(np.frombuffer(bytearray(message), np.uint8))
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64)
    _finish(dist.all_gather_single(sizes, torch.tensor([len(content)]), group=group, async_op=True), group)

    longest = int(sizes.max())
    padded = torch.zeros(longest + -longest % ALIGNMENT, dtype=torch.uint8)  # gloo's all-gather needs equal sizes
    padded[: len(content)] = content
    out = padded.new_empty(ranks * len(padded))
    _finish(dist.all_gather_single(out, padded, group=group, async_op=True), group)
    return [row[:size] for row, size in zip(out.view(ranks, -1).numpy(), sizes.tolist(), strict=True)]


def _finish(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective.

    A background thread has its own group (`group` is not None) and polls from Python. If it waited inside torch while
    the interpreter shuts down (Python 3.11), it would abort the process.
    """
    while group is not None and not work.is_completed():
        time.sleep(POLL_SECONDS)
    work.wait()


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _pack(payloads: Sequence[Payload]) -> torch.Tensor:
    """Serialize payloads as the length of a JSON description, the description, and the arrays, with aligned offsets."""
    descriptions = []
    contents = []
    for header, arrays in payloads:
        array_descriptions = []
        for name, array in _to_host(arrays).items():
            array_descriptions.append((name, str(array.dtype).removeprefix("torch."), array.shape))
            contents.append(array.flatten().view(torch.uint8))
        descriptions.append((header, array_descriptions))
    text = torch.frombuffer(bytearray(json.dumps(descriptions), "utf-8"), dtype=torch.uint8)
    text_length = torch.tensor([len(text)]).view(torch.uint8)

    pieces = []
    for content in (text_length, text, *contents):
        pieces.append(content)
        pieces.append(torch.zeros(-len(content) % ALIGNMENT, dtype=torch.uint8))
    return torch.cat(pieces)


def _unpack(buffer: torch.Tensor) -> list[Received]:
    """Return the payloads in a buffer that `_pack` has written. Arrays are views of the buffer."""
    if not len(buffer):
        return []
    offset = 0

    def read(size: int) -> torch.Tensor:
        """Return the next `size` bytes and skip the padding after them."""
        nonlocal offset
        start = offset
        offset += size + -size % ALIGNMENT
        return buffer[start : start + size]

    text_length = int(read(8).view(torch.int64))
    descriptions = json.loads(read(text_length).numpy().tobytes())
    payloads = []
    for header, array_descriptions in descriptions:
        arrays = {}
        for name, dtype_name, shape in array_descriptions:
            dtype = getattr(torch, dtype_name)
            arrays[name] = read(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        payloads.append((header, arrays))
    return payloads


def _to_host(arrays: Mapping[str, torch.Tensor | npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Return the arrays as contiguous CPU tensors."""
    return {name: torch.as_tensor(array, device="cpu").detach().contiguous() for name, array in arrays.items()}
