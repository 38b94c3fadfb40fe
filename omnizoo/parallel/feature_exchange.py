"""Send the features of media items from the ranks that encode them to the ranks that hold their placeholder tokens.

Items are assigned to ranks by cost, so an item is often encoded on another rank than the one that holds its tokens.
Gradients take the same route back. All ranks have the metadata of all items, so each rank computes the routes without
communication.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnizoo.ops.device import to_device
from omnizoo.parallel.exchange import exchange_tables
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.sequence.slicing import slice_tokens

Numbers = npt.NDArray[np.int64]
Port = Any  # hashable and sortable; items of a port are encoded together, and their features have the same width


class RoutedSpan(Protocol):
    """The properties of a media item that determine the routes of its features."""

    @property
    def port(self) -> Port: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...  # placeholder tokens: (first in the micro-batch, count)

    @property
    def is_target(self) -> bool: ...  # targets are also needed at the preceding tokens, which predict them

    @property
    def has_targets(self) -> bool: ...  # whether the features contribute to the loss as targets

    @property
    def places(self) -> int: ...  # number of features; the spans may repeat the features several times


@dataclass(frozen=True)
class PackGroup:
    """The packs of one data-parallel rank in this micro-batch; its `sp` ranks share them."""

    lengths: Sequence[int]  # tokens of each sample
    items: Sequence[RoutedSpan]  # media items of the packs
    owners: Sequence[int]  # for each item: the global rank that computes its features


@dataclass(frozen=True)
class FeatureRoute:
    """Features of one port that one rank sends and receives in one micro-batch.

    A feature is sent to a rank only once, even if the rank holds both its token and the token before.
    """

    order: torch.Tensor  # [sent] indices into this rank's features, sorted by destination rank
    sent: list[int]  # number of features sent to each rank
    received: list[int]  # number of features received from each rank
    place: torch.Tensor  # [received] local index of the feature's token; -1 if another rank holds it
    before: torch.Tensor  # [received] local index of the token that predicts it; -1 if on another rank, or no target
    learnt: torch.Tensor  # [received] 1 if the feature is a target


def plan_routes(
    layout: Layout, rank: int, shares: Sequence[PackGroup], present: Sequence[Port] | None = None
) -> dict[Port, FeatureRoute]:
    """Return the route to and from `rank` for every port that has an item on any rank.

    The features of a rank are those of the items that it owns, in the order of `shares` and of the items in each share.

    Args:
        layout: Sizes of the mesh axes.
        rank: Global rank to plan for.
        shares: One entry per data-parallel rank.
        present: Ports that have an item on any rank. If set, `shares` may omit items that `rank` neither owns nor holds
            a token of.
    """
    assert len(shares) == layout.dp, f"{len(shares)} shares for {layout.dp} dp ranks"
    dp_rank, sp_rank = divmod(rank, layout.sp)
    ports = sorted(
        {item.port for share in shares for item in share.items if item.spans} if present is None else present
    )
    # Rows: destination rank, index among this rank's features.
    leaving = {port: [np.empty((2, 0), np.int64)] for port in ports}
    # Rows: source rank, local index of the token, local index of the token before, whether it is a target.
    arriving = {port: [np.empty((4, 0), np.int64)] for port in ports}
    made = dict.fromkeys(ports, 0)
    for dp, share in enumerate(shares):
        owned = zip(share.items, share.owners, strict=True)
        items = [(item, owner) for item, owner in owned if item.spans and (dp == dp_rank or owner == rank)]
        if not items:  # `_holders` is expensive: compute it only for shares that involve this rank
            continue
        holder, place = _holders(layout, share.lengths)
        starts = np.cumsum([0, *share.lengths])
        for item, owner in items:
            tokens = np.concatenate([np.arange(first, first + count) for first, count in item.spans])
            is_first = item.is_target and np.isin(tokens, starts).any()
            assert not is_first, "what is to be predicted has no token before it"
            reached = np.stack([tokens, tokens - 1] if item.is_target else [tokens])  # [1 or 2, places]
            to = holder[reached]
            if owner == rank:
                own = np.broadcast_to(made[item.port] + np.arange(len(tokens)) % item.places, to.shape)
                made[item.port] += item.places
                is_new = np.ones(to.shape, bool)
                is_new[1:] = to[1:] != to[0]
                leaving[item.port].append(np.stack([dp * layout.sp + to.T[is_new.T], own.T[is_new.T]]))
            if dp == dp_rank:
                here = np.full((4, len(tokens)), -1)
                here[0], here[3] = owner, item.has_targets
                here[1 : 1 + len(to)] = np.where(to == sp_rank, place[reached], -1)
                arriving[item.port].append(here[:, (here[1:3] >= 0).any(0)])
    return {
        port: _route(layout.world, np.concatenate(leaving[port], axis=1), np.concatenate(arriving[port], axis=1))
        for port in ports
    }


def exchange_features(
    features: Mapping[Port, torch.Tensor], routes: Mapping[Port, FeatureRoute], group: dist.ProcessGroup | None = None
) -> dict[Port, torch.Tensor]:
    """Send this rank's features `[n, C]` of each port, and return the received rows for the tokens that it holds.

    `FeatureRoute.place` and `FeatureRoute.before` contain the token of each received row. All ports share one
    all-to-all; there is none if no rank has an item. The result depends on `features` even if it is empty, so a rank
    that uses the whole result takes part in backward and gets exact zeros. Collective: all ranks must call it.
    """
    ports = sorted(port for port in routes if port in features)
    rows = [features[port].index_select(0, to_device(routes[port].order, features[port].device)) for port in ports]
    if ports and len(routes[ports[0]].sent) > 1:
        sent, received = [routes[port].sent for port in ports], [routes[port].received for port in ports]
        rows = list(exchange_tables(rows, sent, received, group, "world"))
    received_rows = dict(zip(ports, rows, strict=True))
    return {port: received_rows.get(port, made[:0]) for port, made in features.items()}


def gather_rows(
    states: torch.Tensor, route: FeatureRoute | None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the hidden states at the tokens of this rank's items, in the order of its features.

    This is the inverse of `exchange_features`: `states` `[T, C]` are the rows of the tokens that this rank holds, and
    one all-to-all sends them to the ranks that own the items. `route` is None if no rank has an item. Collective: all
    ranks must call it.
    """
    if route is None:
        return states[:0]
    rows = states.index_select(0, to_device(route.place, states.device))
    if len(route.sent) > 1:
        (rows,) = exchange_tables([rows], [route.received], [route.sent], group, "world")
    # Rows arrive sorted by the ranks that hold the tokens. Invert `order` to sort them by feature.
    back = torch.empty_like(route.order)
    back[route.order] = torch.arange(len(route.order))
    return rows.index_select(0, to_device(back, rows.device))


def _holders(layout: Layout, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return, for each token of a micro-batch, the sequence-parallel rank that holds it and its index on that rank."""
    slices = slice_tokens(lengths, layout.ring, layout.ulysses)
    tokens = np.concatenate(slices)
    holder, place = np.empty_like(tokens), np.empty_like(tokens)
    holder[tokens] = np.repeat(np.arange(layout.sp), [len(held) for held in slices])
    place[tokens] = np.concatenate([np.arange(len(held)) for held in slices])
    return holder, place


def _route(world: int, leaving: Numbers, arriving: Numbers) -> FeatureRoute:
    """Sort the sent features by destination and the received ones by source."""
    # The sort is stable, so sender and receiver use the same order: that of the items and of their tokens.
    (goes_to, own), (comes_from, place, before, learnt) = leaving, arriving[:, np.argsort(arriving[0], kind="stable")]
    return FeatureRoute(
        order=torch.from_numpy(own[np.argsort(goes_to, kind="stable")]),
        sent=np.bincount(goes_to, minlength=world).tolist(),
        received=np.bincount(comes_from, minlength=world).tolist(),
        place=torch.from_numpy(place.copy()),
        before=torch.from_numpy(before.copy()),
        learnt=torch.from_numpy(learnt.copy()),
    )
