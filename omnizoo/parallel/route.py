"""Features made on some ranks, needed on others: an item is worked on where there is time for it, its features are sent
to the ranks that hold its tokens, and their gradients back. All ranks know all items, so who sends what is planned, not
asked.
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
from omnizoo.parallel.sequence import slice_tokens

Numbers = npt.NDArray[np.int64]
Port = Any  # can be a key and be sorted; items of a port are worked on together, and have features of one width


class Placed(Protocol):
    """What a route needs to know of an item."""

    @property
    def port(self) -> Port: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...  # (first token in the micro-batch, how many) of its places

    @property
    def is_target(self) -> bool: ...  # also needed at the tokens before its own, which predict it

    @property
    def is_learnt(self) -> bool: ...  # as a target

    @property
    def places(self) -> int: ...  # how many features it has; its spans may hold them several times, one after the other


@dataclass(frozen=True)
class Share:
    """What the ranks that share a pack work on in this micro-batch."""

    lengths: Sequence[int]  # of its samples
    items: Sequence[Placed]
    owners: Sequence[int]  # of each item: the rank, of all, that makes its features


@dataclass(frozen=True)
class Route:
    """The way of one port's features in one micro-batch, as one rank sees it. A feature goes to a rank once, whether
    that holds its token, the token before it, or both."""

    order: torch.Tensor  # [sent] which of its own features, ordered by the rank they go to
    sent: list[int]  # how many to each rank
    received: list[int]  # how many from each rank
    place: torch.Tensor  # [received] the token of each feature that arrives, among those this rank holds; -1: not here
    before: torch.Tensor  # [received] and the token that predicts it; -1: not here, or nobody does
    learnt: torch.Tensor  # [received] 1: as a target


@dataclass(frozen=True)
class Arrived:
    """Features of one port for the tokens of this rank."""

    features: torch.Tensor  # [N, C]
    place: torch.Tensor  # [N] the token, among those this rank holds, in whose place each is
    predicted: torch.Tensor  # [M, C] those to be predicted
    before: torch.Tensor  # [M] the token that each is predicted from
    learnt: torch.Tensor | None  # [L] which of these are learnt; None: all


def plan_routes(
    layout: Layout, rank: int, shares: Sequence[Share], present: Sequence[Port] | None = None
) -> dict[Port, Route]:
    """For every port with an item anywhere, how features travel from and to `rank`; `shares`: of all dp ranks.

    Where `present` names these ports, shares may leave out items that `rank` neither owns nor holds a token of.

    A rank's own features of a port are those of the items it owns, in the order of `shares` and of the items in there.
    """
    assert len(shares) == layout.dp, f"{len(shares)} shares for {layout.dp} dp ranks"
    dp_rank, sp_rank = divmod(rank, layout.sp)
    ports = sorted(
        {item.port for share in shares for item in share.items if item.spans} if present is None else present
    )
    leaving = {port: [np.empty((2, 0), np.int64)] for port in ports}  # (rank it goes to, number among its own)
    # (rank it comes from, its token, the one before, whether it is learnt)
    arriving = {port: [np.empty((4, 0), np.int64)] for port in ports}
    made = dict.fromkeys(ports, 0)
    for dp, share in enumerate(shares):
        owned = zip(share.items, share.owners, strict=True)
        items = [(item, owner) for item, owner in owned if item.spans and (dp == dp_rank or owner == rank)]
        if not items:  # slices are worked out only where this rank has to do with them
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
                here[0], here[3] = owner, item.is_learnt
                here[1 : 1 + len(to)] = np.where(to == sp_rank, place[reached], -1)
                arriving[item.port].append(here[:, (here[1:3] >= 0).any(0)])
    return {
        port: _route(layout.world, np.concatenate(leaving[port], axis=1), np.concatenate(arriving[port], axis=1))
        for port in ports
    }


def deliver(
    features: Mapping[Port, torch.Tensor], routes: Mapping[Port, Route], group: dist.ProcessGroup | None = None
) -> dict[Port, Arrived]:
    """Of each port, this rank's own features `[n, C]` become those of the tokens it holds.

    One all-to-all for all ports of `features`, none if nobody has an item. What comes back depends on `features` even
    if it is empty: whoever uses all of it answers the other ranks in backward and gets exact zeros.
    """
    ports = sorted(port for port in routes if port in features)
    own = [features[port].index_select(0, to_device(routes[port].order, features[port].device)) for port in ports]
    if ports and len(routes[ports[0]].sent) > 1:
        sent, received = [routes[port].sent for port in ports], [routes[port].received for port in ports]
        own = list(exchange_tables(own, sent, received, group))
    arrived = {}
    for port, came in zip(ports, own, strict=True):
        route = routes[port]
        arrived[port] = Arrived(*_at(came, route.place), *_at(came, route.before), _learnt(route, came.device))
    nothing = torch.empty(0, dtype=torch.int64)
    return {
        port: arrived.get(port) or Arrived(*_at(made[:0], nothing), *_at(made[:0], nothing), None)
        for port, made in features.items()
    }


def collect(states: torch.Tensor, route: Route | None, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`deliver`, the other way: of rows `[T, C]` of the tokens this rank holds, those of its own items' places come to
    it, in the order of its features. One all-to-all; None: nobody has an item."""
    if route is None:
        return states[:0]
    rows = states.index_select(0, to_device(route.place, states.device))
    if len(route.sent) > 1:
        (rows,) = exchange_tables([rows], [route.received], [route.sent], group)
    # The way there was ordered by the ranks that hold the tokens: `order` says which row each is of.
    back = torch.empty_like(route.order)
    back[route.order] = torch.arange(len(route.order))
    return rows.index_select(0, to_device(back, rows.device))


def _at(features: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those that have a token, and these tokens."""
    kept = (tokens >= 0).nonzero().squeeze(1)
    there = to_device(tokens[kept], features.device)
    return features if len(kept) == len(features) else features[to_device(kept, features.device)], there


def _learnt(route: Route, device: torch.device) -> torch.Tensor | None:
    """Which of those that are predicted here; None: all."""
    flags = route.learnt[route.before >= 0]
    return None if flags.all() else to_device(flags.nonzero().squeeze(1), device)


def _holders(layout: Layout, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Of each token of a micro-batch: the sequence-parallel rank that holds it, and its place among that rank's."""
    slices = slice_tokens(lengths, layout.ring, layout.ulysses)
    tokens = np.concatenate(slices)
    holder, place = np.empty_like(tokens), np.empty_like(tokens)
    holder[tokens] = np.repeat(np.arange(layout.sp), [len(held) for held in slices])
    place[tokens] = np.concatenate([np.arange(len(held)) for held in slices])
    return holder, place


def _route(world: int, leaving: Numbers, arriving: Numbers) -> Route:
    # Stable: what goes from one rank to another keeps the order of items and of their places, which both ends know.
    (goes_to, own), (comes_from, place, before, learnt) = leaving, arriving[:, np.argsort(arriving[0], kind="stable")]
    return Route(
        order=torch.from_numpy(own[np.argsort(goes_to, kind="stable")]),
        sent=np.bincount(goes_to, minlength=world).tolist(),
        received=np.bincount(comes_from, minlength=world).tolist(),
        place=torch.from_numpy(place.copy()),
        before=torch.from_numpy(before.copy()),
        learnt=torch.from_numpy(learnt.copy()),
    )
