"""FSDP2's all-gather and reduce-scatter between CPUs, as plain messages from rank to rank; and on a single rank.

gloo's own (torch 2.13) copy what they send several times: for 25 MB on two ranks they take 16 and 22 ms of a CPU, these
take 6 (benchmarks/gloo.py). On accelerators the backend's own collectives are used.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from omnizoo.ops.torch_private import free_gathered_buffer

# Tags of messages, apart from those of everybody else in the same group.
GATHERING, SCATTERING = 7001, 7002


class Messages(dist.Work):
    """Several messages that are under way."""

    def __init__(self, messages: Iterable[dist.Work | None]) -> None:
        super().__init__()
        self._messages = [message for message in messages if message is not None]

    def wait(self, timeout: object = None) -> bool:
        for message in self._messages:
            message.wait()
        self._messages.clear()
        return True


class DirectAllGather:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        own, parts = group.rank(), output_tensor.chunk(group.size())
        work = _exchange([input_tensor] * len(parts), parts, group, GATHERING)
        if parts[own].data_ptr() != input_tensor.data_ptr():  # FSDP2 gathers in place
            parts[own].copy_(input_tensor)
        return work if async_op or not work.wait() else None


class DirectReduceScatter:
    def __init__(self) -> None:
        self._given: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2 asks for what goes in first, then for what comes out."""
        made = torch.empty(*size, dtype=dtype, device=device)
        if self._given is None:
            self._given = made
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, "gradients are summed"
        assert not async_op, "FSDP2 waits for it"
        own, parts = group.rank(), input_tensor.chunk(group.size())
        arrived = [part if i == own else torch.empty_like(part) for i, part in enumerate(parts)]
        _exchange(parts, arrived, group, SCATTERING).wait()
        torch.add(arrived[0], arrived[1], out=output_tensor)  # in the order of ranks
        for part in arrived[2:]:
            output_tensor.add_(part)
        if self._given is input_tensor:
            self.free(input_tensor)
        self._given = None
        return None

    def free(self, given: torch.Tensor) -> None:
        """All of it has been sent and added up; FSDP2 would keep it until the next unit has its gradients."""
        given.untyped_storage().resize_(0)


def _exchange(
    given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> Messages:
    """Begin to send `given[i]` to rank i of `group`, and to fill `taken[i]` with what that rank sends."""
    own, size = group.rank(), group.size()
    messages = []
    for distance in range(1, size):
        to, source = (own + distance) % size, (own - distance) % size
        messages.append(dist.isend(given[to], group=group, group_dst=to, tag=tag))
        messages.append(dist.irecv(taken[source], group=group, group_src=source, tag=tag))
    return Messages(messages)


class OneRank:
    """The reduce-scatter of a unit that one rank has for itself, as experts are where each rank has its own.

    FSDP2 (torch 2.13) asks for memory twice, for what goes in and for what comes out, and copies the one to the other:
    here both are the same.
    """

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        given, self._given = self._given, None
        if given is None:
            given = self._given = torch.empty(*size, dtype=dtype, device=device)
        return given

    def __call__(self, **_: object) -> None:
        raise AssertionError("one rank has nothing to reduce")


def set_collectives(unit: FSDPModule, group: dist.ProcessGroup) -> None:
    """Let `unit` gather weights and reduce gradients over `group` by what is best there."""
    # Their classes are private in torch, what they have is not.
    if group.size() == 1:
        unit.set_custom_reduce_scatter(OneRank())  # type: ignore[arg-type]
    elif dist.get_backend(group) == "gloo":
        unit.set_custom_all_gather(DirectAllGather())  # type: ignore[arg-type]
        free_gathered_buffer(unit)
        unit.set_custom_reduce_scatter(DirectReduceScatter())  # type: ignore[arg-type]
