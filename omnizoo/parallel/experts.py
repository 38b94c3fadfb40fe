"""Expert parallelism: distribute whole experts over the `ep` axis, and shard each expert over `ep_shard` with FSDP2.

`Dispatch` sends tokens to the ranks that hold their experts, and sends the results back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from omnizoo.config.errors import UserError
from omnizoo.ops.experts import (
    Pairs,
    add_choices,
    by_expert,
    combine,
    gather,
    repeat_by_choice,
    sort_by_expert,
)
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.exchange import exchange_rows
from omnizoo.parallel.fsdp.shard import RESIDENT, make_unit
from omnizoo.parallel.layout import Layout, divisors
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.traffic_tag import sent_along


@dataclass(frozen=True)
class ExpertRoute:
    """Routing of one MoE layer: the (token, choice) pairs that this rank sends to and receives from each rank."""

    pairs: Pairs  # pairs of this rank's tokens, sorted by expert
    received_pairs: Pairs  # reorders rows from (source rank, expert, token) to (expert, source rank, token)
    sent: list[int]  # number of pairs sent to each rank
    received: list[int]  # number of pairs received from each rank


@dataclass(frozen=True)
class Dispatch:
    """Sends each token to the ranks of `group` that hold its experts, and returns the results. No token is dropped.

    With E experts, rank r holds E/ranks consecutive experts, starting at r x E/ranks. Rows `[tokens x choices, width]`
    are sent by one all-to-all and their results returned by another, in forward and in backward. The row counts are
    exchanged first. This needs one host sync. Recomputation reuses the counts of the first forward pass and skips the
    all-to-all that returns the results. Collective: all ranks must call it, including ranks without tokens.
    """

    group: dist.ProcessGroup
    experts: int  # number of experts of the layer, over all ranks
    recomputation: Recomputation = field(default_factory=Recomputation)

    def __call__(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token, `[tokens, width]`.

        Args:
            hidden: Hidden states of this rank's tokens, `[tokens, width]`.
            index: Experts that each token chose, `[tokens, choices]`.
            weights: Routing weights, `[tokens, choices]`.
            compute: Function of (rows sorted by expert, number of rows of each local expert, routing weights) that runs
                the experts of this rank.
        """
        route: ExpertRoute = self.recomputation.once(partial(self.route, index))
        pairs = route.pairs
        received = route.received_pairs
        rows = exchange_rows(gather(hidden, pairs), route.sent, route.received, self.group, "ep")
        row_weights = exchange_rows(by_expert(weights, pairs), route.sent, route.received, self.group, "ep")
        rows = compute(gather(rows, received), received.counts, gather(row_weights, received))
        out: torch.Tensor = _ReturnToTokens.apply(combine(rows, received), self, route)  # type: ignore[no-untyped-call]
        return out

    def route(self, index: torch.Tensor) -> ExpertRoute:
        """Return the route of tokens that chose the experts `index [tokens, choices]`.

        Collective: all ranks must call it.
        """
        ranks = self.group.size()
        num_local_experts = self.experts // ranks
        pairs = sort_by_expert(index, self.experts)
        received_counts = torch.empty_like(pairs.counts)
        with sent_along("ep"):
            dist.all_to_all_single(received_counts, pairs.counts, group=self.group)
        sent, received = self.split(pairs, received_counts)

        # Pairs arrive sorted by (source rank, expert, token). Experts need the order (expert, source rank, token). Both
        # orders are deterministic.
        experts = torch.arange(num_local_experts, device=index.device).repeat(ranks)
        expert_of_pair = experts.repeat_interleave(received_counts, output_size=sum(received)).unsqueeze(1)
        received_pairs = sort_by_expert(expert_of_pair, num_local_experts)
        return ExpertRoute(pairs=pairs, received_pairs=received_pairs, sent=sent, received=received)

    def split(self, pairs: Pairs, received_counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the number of pairs sent to and received from each rank. This is the only host sync of the layer."""
        by_rank = torch.stack([pairs.counts, received_counts]).view(2, self.group.size(), -1).sum(2)
        sent, received = by_rank.tolist()
        return sent, received


def max_over_group(group: dist.ProcessGroup, device: torch.device, count: int) -> int:
    """Return the maximum of `count` over `group`, with a host sync. Collective: all ranks of `group` must call it."""
    maximum = torch.full((), count, dtype=torch.int64, device=device)  # `full` keeps the value readable in a dry run
    with sent_along("ep"):
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
    return int(maximum)


class _ReturnToTokens(torch.autograd.Function):
    """Sends the experts' outputs back and adds up the choices of each token, like `combine` across ranks.

    The function saves no tensor for backward. Selective recomputation keeps its output, which has one row per token
    instead of one per choice.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, dispatch: Dispatch, route: ExpertRoute) -> torch.Tensor:
        ctx.dispatch = dispatch
        ctx.route = route

        def return_rows() -> torch.Tensor:
            if dispatch.recomputation.is_for_gradients:
                num_tokens = len(route.pairs.order) // route.pairs.choices
                return rows.new_empty(num_tokens, rows.shape[1])
            returned = exchange_rows(rows, route.received, route.sent, dispatch.group, "ep")
            return add_choices(returned, route.pairs)

        return dispatch.recomputation.once(return_rows, large=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route: ExpertRoute = ctx.route
        rows = repeat_by_choice(grad, route.pairs)
        return exchange_rows(rows, route.sent, route.received, ctx.dispatch.group, "ep"), None, None


def check_experts(layout: Layout, experts: int) -> None:
    """Raise a `UserError` if `ep` does not divide the number of experts.

    The message suggests the nearest valid value.
    """
    if experts % layout.ep == 0:
        return
    valid_sizes = [ep for ep in divisors(layout.fsdp) if experts % ep == 0]
    nearest = min(valid_sizes, key=lambda ep: abs(ep - layout.ep))
    raise UserError(
        f"parallel.ep: {layout.ep} does not divide the model's {experts} experts. Use {nearest}, the nearest size that "
        f"divides both the experts and the {layout.fsdp} ranks that share one copy of the weights."
    )


def shard_experts(
    modules: Iterable[nn.Module],
    mesh: Mesh,
    reshard: bool,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy = RESIDENT,
) -> list[nn.Module]:
    """Distribute the experts of each module over `ep` and shard them over `ep_shard` with FSDP2, in place.

    Call this before the surrounding blocks are sharded. Parameters have the shape `[experts, ...]`, and each rank keeps
    1 / (ep x ep_shard) of every parameter. Routing weights keep the precision of the router; rows are cast where they
    are multiplied by the experts' weights.

    Returns:
        The modules that became FSDP2 units.
    """
    units: list[nn.Module] = []
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard, "offload_policy": offload}
    for module in modules:
        for child in module.children():
            # All experts share these weights, so shard them like dense weights.
            if any(True for _ in child.parameters()):
                make_unit(child, mesh.fsdp, **options)
                units.append(child)

        parameters = dict(module.named_parameters(recurse=False))
        split_dims = {tuple(p.shape): _dim_to_split(name, p.shape, mesh.layout) for name, p in parameters.items()}
        if mesh.layout.ep > 1:
            for name, p in parameters.items():
                local_experts = distribute_tensor(p.detach(), mesh.experts["ep"], [Shard(0)], src_data_rank=None)
                setattr(module, name, nn.Parameter(local_experts, p.requires_grad))
        make_unit(module, mesh.expert_fsdp, shard_placement_fn=partial(_placement, split_dims), **options)
        units.append(module)
    return units


def _placement(split_dims: dict[tuple[int, ...], int], parameter: nn.Parameter) -> Shard:
    """Return the placement of a parameter. FSDP2 passes a parameter without its name, so the shape identifies it."""
    return Shard(split_dims[tuple(parameter.shape)])


def _dim_to_split(name: str, shape: Sequence[int], layout: Layout) -> int:
    """Return the dim to split over `ep_shard`.

    This is usually the last dim. If `ep` is 1, it is dim 0 (experts), unless `ep_shard` divides only the last dim.

    The middle dim cannot be split. If a checkpoint stores gate and up projection separately, transformers' loader
    (5.22.2) slices each of them and then concatenates the slices along that dim. A rank would get a slice of both
    projections instead of a slice of the concatenated weight.
    """
    ranks = layout.ep_shard
    last = len(shape) - 1
    if layout.ep == 1 and (shape[0] % ranks == 0 or shape[last] % ranks):
        return 0  # FSDP2 can pad only dim 0, so a dim that is not divisible must be dim 0
    if shape[last] % ranks:
        raise UserError(
            f"parallel.ep: {layout.ep} shards each expert over {ranks} ranks, but {ranks} does not divide the last dim "
            f"of `{name}` {list(shape)}. Use parallel.ep: {layout.fsdp} or 1."
        )
    return last
