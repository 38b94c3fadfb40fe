"""Expert parallelism: whole experts spread over the `ep` axis, each FSDP-sharded over `ep_shard`, and the exchange that
brings tokens to their experts and back."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from omnizoo.config.errors import UserError
from omnizoo.ops.experts import (
    Pairs,
    add_choices,
    by_expert,
    gather,
    repeat_by_choice,
    restore,
    sort_by_expert,
)
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.layout import Layout, divisors
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import RESIDENT, set_communication


@dataclass(frozen=True)
class Route:
    """Which pairs of a layer go where."""

    pairs: Pairs  # of this rank's tokens, by expert
    arriving: Pairs  # those that come here, from the order (source rank, expert, token) to (expert, source rank, token)
    sent: list[int]  # pairs for each rank
    received: list[int]


@dataclass(frozen=True)
class Dispatch:
    """Sends each token to the ranks of `group` that hold its experts, and the results back. No token is dropped.

    Rank r holds experts r x E/ranks and on. Of rows `[T x K, H]`, one all-to-all goes there and one back (in backward
    as well). Who gets how many is exchanged before, and read on the host once; recomputation remembers it, and ends
    before the way back. Ranks without tokens must call, too.
    """

    group: dist.ProcessGroup
    experts: int  # of the layer, over all ranks
    recomputation: Recomputation = field(default_factory=Recomputation)

    def __call__(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        route: Route = self.recomputation.once(partial(self.route, index))
        pairs, arriving = route.pairs, route.arriving
        rows = exchange_rows(gather(hidden, pairs), route.sent, route.received, self.group)
        arrived = exchange_rows(by_expert(weights, pairs), route.sent, route.received, self.group)
        rows = compute(gather(rows, arriving), arriving.counts, gather(arrived, arriving))
        out: torch.Tensor = _WayBack.apply(restore(rows, arriving), self, route)  # type: ignore[no-untyped-call]
        return out

    def route(self, index: torch.Tensor) -> Route:
        ranks = self.group.size()
        here = self.experts // ranks
        pairs = sort_by_expert(index, self.experts)
        arriving = torch.empty_like(pairs.counts)
        dist.all_to_all_single(arriving, pairs.counts, group=self.group)
        sent, received = self.split(pairs, arriving)
        # They come ordered by (source rank, expert, token); experts want (expert, source rank, token), a fixed order.
        expert = torch.arange(here, device=index.device).repeat(ranks)
        local = expert.repeat_interleave(arriving, output_size=sum(received)).unsqueeze(1)
        return Route(pairs, sort_by_expert(local, here), sent, received)

    def split(self, pairs: Pairs, arriving: torch.Tensor) -> tuple[list[int], list[int]]:
        """How many pairs go to each rank, and come from it: the one thing that the host must know."""
        by_rank = torch.stack([pairs.counts, arriving]).view(2, self.group.size(), -1).sum(2)
        sent, received = by_rank.tolist()
        return sent, received


def most_of(group: dist.ProcessGroup, device: torch.device, count: int) -> int:
    """The largest of what the ranks of `group` give; the host waits for it."""
    most = torch.full((), count, dtype=torch.int64, device=device)  # its value is known to a dry run
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most)


class _WayBack(torch.autograd.Function):
    """`combine` of rows that are elsewhere. It saves nothing, and what comes of it is K times smaller than the rows:
    selective recomputation keeps that."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, dispatch: Dispatch, route: Route) -> torch.Tensor:
        ctx.dispatch, ctx.route = dispatch, route

        def come_back() -> torch.Tensor:
            if dispatch.recomputation.is_for_gradients:
                return rows.new_empty(len(route.pairs.order) // route.pairs.choices, rows.shape[1])
            arrived = exchange_rows(rows, route.received, route.sent, dispatch.group)
            return add_choices(arrived, route.pairs)

        return dispatch.recomputation.once(come_back, large=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route: Route = ctx.route
        rows = repeat_by_choice(grad, route.pairs)
        return exchange_rows(rows, route.sent, route.received, ctx.dispatch.group), None, None


def check_experts(layout: Layout, experts: int) -> None:
    """Refuse an `ep` that would split an expert, and name the nearest that does not."""
    if experts % layout.ep:
        possible = [ep for ep in divisors(layout.fsdp) if experts % ep == 0]
        nearest = min(possible, key=lambda ep: abs(ep - layout.ep))
        raise UserError(
            f"parallel.ep: {layout.ep} does not divide the model's {experts} experts; the nearest that does, and "
            f"divides the {layout.fsdp} ranks that share one copy of the weights, is {nearest}"
        )


def shard_experts(
    modules: Iterable[nn.Module],
    mesh: Mesh,
    reshard: bool,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy = RESIDENT,
) -> list[nn.Module]:
    """Spread the experts of each module over `ep`, and make it a unit of FSDP2 over `ep_shard`, in place; the units.

    Goes before the blocks around them are sharded. Parameters are `[experts, ...]`; a rank ends up with
    1 / (ep x ep_shard) of each. Routing weights keep the precision the router gave them; rows are cast where they meet
    the experts' weights.
    """
    units: list[nn.Module] = []
    how: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard, "offload_policy": offload}
    for module in modules:
        for child in module.children():
            if any(True for _ in child.parameters()):  # shared by all experts, so sharded like dense weights
                unit = fully_shard(child, mesh=mesh.fsdp, **how)
                set_communication(unit, mesh.fsdp)
                units.append(child)
        own = dict(module.named_parameters(recurse=False))
        split = {tuple(p.shape): _dim_to_split(name, p.shape, mesh.layout) for name, p in own.items()}
        if mesh.layout.ep > 1:
            for name, p in own.items():
                part = distribute_tensor(p.detach(), mesh.experts["ep"], [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(part, p.requires_grad))
        unit = fully_shard(module, mesh=mesh.expert_fsdp, shard_placement_fn=partial(_placement, split), **how)
        set_communication(unit, mesh.expert_fsdp)
        units.append(module)
    return units


def _placement(split: dict[tuple[int, ...], int], parameter: nn.Parameter) -> Shard:
    return Shard(split[tuple(parameter.shape)])


def _dim_to_split(name: str, shape: Sequence[int], layout: Layout) -> int:
    """The dim that `ep_shard` ranks share: whole experts if `ep` leaves them to us, else the last dim.

    Not the one in between: where a gate and its up projection are published apart, transformers' loader (5.22.2) joins
    them along that dim after it has sliced each, so a rank would get a part of both instead of a part of the whole.
    """
    ranks, last = layout.ep_shard, len(shape) - 1
    if layout.ep == 1 and (shape[0] % ranks == 0 or shape[last] % ranks):
        return 0  # FSDP2 pads the first dim where it must, and only that
    if shape[last] % ranks:
        raise UserError(
            f"parallel.ep: {layout.ep} leaves {ranks} ranks to share each expert, but the last dim of `{name}` "
            f"{list(shape)} cannot be divided by {ranks}; use parallel.ep: {layout.fsdp} or 1"
        )
    return last
