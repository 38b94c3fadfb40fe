"""Rows made on some ranks, needed on others: an item is worked on where there is time for it, its rows are sent to the
ranks that hold its tokens, and their gradients back. All ranks know all items, so who sends what is planned, not asked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnizoo.parallel.exchange import exchange_tables
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.sequence import slice_tokens

Numbers = npt.NDArray[np.int64]


Port = Any  # whatever can be a key and be sorted; items of a port are worked on together, and have rows of one width


class Placed(Protocol):
    """What a route needs to know of an item."""

    @property
    def port(self) -> Port: ...

    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...  # (first token in the micro-batch, how many) of its rows


@dataclass(frozen=True)
class Share:
    """What the ranks that share a pack work on in this micro-batch."""

    lengths: Sequence[int]  # of its samples
    items: Sequence[Placed]
    owners: Sequence[int]  # of each item: the rank, of all, that makes its rows


@dataclass(frozen=True)
class Route:
    """The way of one port's rows in one micro-batch, as one rank sees it."""

    order: torch.Tensor  # [sent] which of its own rows, ordered by the rank they go to
    sent: list[int]  # how many to each rank
    received: list[int]  # how many from each rank
    place: torch.Tensor  # [received] the token of each row that arrives, among those this rank holds


def plan_routes(layout: Layout, rank: int, shares: Sequence[Share], shift: int = 0) -> dict[Port, Route]:
    """For every port with a row anywhere, how rows travel from and to `rank`; `shares`: of all dp ranks.

    A rank's own rows of a port are those of the items it owns, in the order of `shares` and of the items in there.
    With `shift` -1 a row goes to the token before its own: the one it is predicted from.
    """
    assert len(shares) == layout.dp, f"{len(shares)} shares for {layout.dp} dp ranks"
    dp_rank, sp_rank = divmod(rank, layout.sp)
    ports = sorted({item.port for share in shares for item in share.items if item.spans})
    goes_to, comes_from, places = ({port: [_NONE] for port in ports} for _ in range(3))  # by port, for each row
    for dp, share in enumerate(shares):
        owned = zip(share.items, share.owners, strict=True)
        items = [(item, owner) for item, owner in owned if item.spans and (dp == dp_rank or owner == rank)]
        if not items:  # slices are worked out only where this rank has to do with them
            continue
        holder, place = _holders(layout, share.lengths)
        starts = np.cumsum([0, *share.lengths])
        for item, owner in items:
            tokens = np.concatenate([np.arange(first, first + rows) for first, rows in item.spans])
            assert not shift or not np.isin(tokens, starts).any(), "a row to predict has no token before it"
            tokens += shift
            if owner == rank:
                goes_to[item.port].append(dp * layout.sp + holder[tokens])
            if dp == dp_rank:
                here = place[tokens[holder[tokens] == sp_rank]]
                places[item.port].append(here)
                comes_from[item.port].append(np.full(len(here), owner))
    return {
        port: _route(layout.world, *(np.concatenate(of[port]) for of in (goes_to, comes_from, places)))
        for port in ports
    }


def deliver(
    features: Mapping[Port, torch.Tensor], routes: Mapping[Port, Route], group: dist.ProcessGroup | None = None
) -> dict[Port, tuple[torch.Tensor, torch.Tensor]]:
    """Of each port, this rank's own rows `[n, C]` become the rows `[N, C]` of the tokens it holds, and which these are.

    One all-to-all for all ports, none if nobody has a row. What comes back depends on `features` even without rows:
    whoever uses all of it, in all its emptiness, answers the other ranks in backward and gets exact zeros.
    """
    ports = sorted(routes)
    rows = [features[port].index_select(0, routes[port].order.to(features[port].device)) for port in ports]
    if ports and len(routes[ports[0]].sent) > 1:
        sent, received = [routes[port].sent for port in ports], [routes[port].received for port in ports]
        rows = list(exchange_tables(rows, sent, received, group))
    places = [routes[port].place.to(features[port].device) for port in ports]
    nothing = {port: (own[:0], own.new_empty(0, dtype=torch.int64)) for port, own in features.items()}
    return nothing | dict(zip(ports, zip(rows, places, strict=True), strict=True))


_NONE: Numbers = np.empty(0, np.int64)


def _holders(layout: Layout, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Of each token of a micro-batch: the sequence-parallel rank that holds it, and its place among that rank's."""
    slices = slice_tokens(lengths, layout.ring, layout.ulysses)
    tokens = np.concatenate(slices)
    holder, place = np.empty_like(tokens), np.empty_like(tokens)
    holder[tokens] = np.repeat(np.arange(layout.sp), [len(held) for held in slices])
    place[tokens] = np.concatenate([np.arange(len(held)) for held in slices])
    return holder, place


def _route(world: int, goes_to: Numbers, comes_from: Numbers, places: Numbers) -> Route:
    # Stable: rows from one rank to another keep the order of items and of rows in them, which both ends know.
    return Route(
        order=torch.from_numpy(np.argsort(goes_to, kind="stable")),
        sent=np.bincount(goes_to, minlength=world).tolist(),
        received=np.bincount(comes_from, minlength=world).tolist(),
        place=torch.from_numpy(places[np.argsort(comes_from, kind="stable")]),
    )
