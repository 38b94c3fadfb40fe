"""Send the features of media items from the ranks that encode them to the ranks that hold their placeholder tokens.

Items are assigned to ranks by cost, so the rank that encodes an item is often not the rank that holds its tokens.
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
    def is_target(self) -> bool: ...  # if True, features are also needed at the preceding tokens, which predict them

    @property
    def has_targets(self) -> bool: ...  # whether the features contribute to the loss as targets

    @property
    def num_placeholders(self) -> int: ...  # number of features; the spans may repeat the features several times


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
    token: torch.Tensor  # [received] local index of the feature's token; -1 if another rank holds it
    # [received] local index of the token that predicts the feature; -1 if there is none on this rank.
    previous_token: torch.Tensor
    has_targets: torch.Tensor  # [received] 1 if the feature contributes to the loss as a target


def plan_routes(
    layout: Layout, rank: int, shares: Sequence[PackGroup], present: Sequence[Port] | None = None
) -> dict[Port, FeatureRoute]:
    """Return the route to and from `rank` for every port that has an item on any rank.

    A rank has the features of the items that it owns, in the order of `shares` and of the items in each share.

    Args:
        layout: Sizes of the mesh axes.
        rank: Global rank to plan for.
        shares: One entry per data-parallel rank.
        present: Ports that have an item on any rank. If set, `shares` may omit items that `rank` does not own
            and whose tokens it does not hold.
    """
    assert len(shares) == layout.dp, f"{len(shares)} shares for {layout.dp} dp ranks"
    dp_rank, sp_rank = divmod(rank, layout.sp)
    if present is None:
        present = list({item.port for share in shares for item in share.items if item.spans})
    ports = sorted(present)

    # Arrays `[2, sent]`: destination ranks, and indices among this rank's features.
    sent = {port: [np.empty((2, 0), np.int64)] for port in ports}
    # Arrays `[4, received]`: source ranks, local indices of the tokens, local indices of the tokens before them, and
    # whether the feature is a target.
    received = {port: [np.empty((4, 0), np.int64)] for port in ports}
    num_features = dict.fromkeys(ports, 0)  # features that this rank computes
    for dp, share in enumerate(shares):
        items = []
        for item, owner in zip(share.items, share.owners, strict=True):
            if item.spans and (dp == dp_rank or owner == rank):
                items.append((item, owner))
        if not items:  # `_holders` is expensive, so call it only for shares that involve this rank
            continue

        holder, local_index = _holders(layout, share.lengths)
        sample_starts = np.cumsum([0, *share.lengths])
        for item, owner in items:
            tokens = np.concatenate([np.arange(first, first + count) for first, count in item.spans])
            is_first = item.is_target and np.isin(tokens, sample_starts).any()
            assert not is_first, "a target has no token before it"
            used_at = np.stack([tokens, tokens - 1] if item.is_target else [tokens])  # [1 or 2, placeholders]
            destinations = holder[used_at]
            if owner == rank:
                feature = num_features[item.port] + np.arange(len(tokens)) % item.num_placeholders
                num_features[item.port] += item.num_placeholders
                sent[item.port].append(_sent_features(feature, dp * layout.sp, destinations))
            if dp == dp_rank:
                rows = np.full((4, len(tokens)), -1)
                rows[0] = owner
                rows[1 : 1 + len(destinations)] = np.where(destinations == sp_rank, local_index[used_at], -1)
                rows[3] = item.has_targets
                is_used_here = (rows[1:3] >= 0).any(0)
                received[item.port].append(rows[:, is_used_here])

    routes = {}
    for port in ports:
        routes[port] = _route(layout.world, np.concatenate(sent[port], axis=1), np.concatenate(received[port], axis=1))
    return routes


def _sent_features(feature: Numbers, first_rank: int, destinations: Numbers) -> Numbers:
    """Return (destination rank, feature) for each sent feature, `[2, sent]`. A feature is sent to a rank only once.

    Args:
        feature: `[placeholders]`, index of each feature.
        first_rank: Global rank of the first sequence-parallel rank.
        destinations: `[1 or 2, placeholders]`, sequence-parallel ranks that hold the token, and the token before it.
    """
    is_new = np.ones(destinations.shape, bool)
    is_new[1:] = destinations[1:] != destinations[0]
    features = np.broadcast_to(feature, destinations.shape)
    # Transpose the arrays, so that the features of one token are adjacent.
    return np.stack([first_rank + destinations.T[is_new.T], features.T[is_new.T]])


def exchange_features(
    features: Mapping[Port, torch.Tensor], routes: Mapping[Port, FeatureRoute], group: dist.ProcessGroup | None = None
) -> dict[Port, torch.Tensor]:
    """Send this rank's features `[n, width]` of each port, and return the rows received for this rank's tokens.

    `FeatureRoute.token` and `FeatureRoute.previous_token` contain the token of each received row. All ports share one
    all-to-all. If no rank has an item, there is no all-to-all. The result depends on `features` even if the result is
    empty, so every rank that uses the whole result takes part in backward. Features that were not sent get gradients of
    exactly 0.
    Collective: all ranks must call it.
    """
    ports = sorted(port for port in routes if port in features)
    rows = []
    for port in ports:
        order = to_device(routes[port].order, features[port].device)
        rows.append(features[port].index_select(0, order))
    if ports and len(routes[ports[0]].sent) > 1:
        sent = [routes[port].sent for port in ports]
        received = [routes[port].received for port in ports]
        rows = list(exchange_tables(rows, sent, received, group, "world"))
    received_rows = dict(zip(ports, rows, strict=True))
    return {port: received_rows.get(port, local_features[:0]) for port, local_features in features.items()}


def gather_rows(
    states: torch.Tensor, route: FeatureRoute | None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the hidden states at the tokens of this rank's items, in the order of its features.

    This is the inverse of `exchange_features`. `states [tokens, width]` are the rows of the tokens that this rank
    holds. One all-to-all sends the rows of items to the ranks that own these items. `route` is None if no rank has an
    item.
    Collective: all ranks must call it.
    """
    if route is None:
        return states[:0]
    rows = states.index_select(0, to_device(route.token, states.device))
    if len(route.sent) > 1:
        (rows,) = exchange_tables([rows], [route.received], [route.sent], group, "world")
    # Rows arrive sorted by the ranks that hold the tokens. Invert `order` to sort them by feature.
    inverse_order = torch.empty_like(route.order)
    inverse_order[route.order] = torch.arange(len(route.order))
    return rows.index_select(0, to_device(inverse_order, rows.device))


def _holders(layout: Layout, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return, for each token of a micro-batch, the sequence-parallel rank that holds it and its index on that rank."""
    slices = slice_tokens(lengths, layout.ring, layout.ulysses)
    tokens = np.concatenate(slices)
    num_tokens = [len(indices) for indices in slices]
    holder = np.empty_like(tokens)
    holder[tokens] = np.repeat(np.arange(layout.sp), num_tokens)
    local_index = np.empty_like(tokens)
    local_index[tokens] = np.concatenate([np.arange(count) for count in num_tokens])
    return holder, local_index


def _route(world: int, sent: Numbers, received: Numbers) -> FeatureRoute:
    """Build the route: sort sent features by destination and received features by source."""
    # The sort is stable, so sender and receiver use the same order: the order of the items and of their tokens.
    destination, feature = sent
    source, token, previous_token, has_targets = received[:, np.argsort(received[0], kind="stable")]
    return FeatureRoute(
        order=torch.from_numpy(feature[np.argsort(destination, kind="stable")]),
        sent=np.bincount(destination, minlength=world).tolist(),
        received=np.bincount(source, minlength=world).tolist(),
        token=torch.from_numpy(token.copy()),
        previous_token=torch.from_numpy(previous_token.copy()),
        has_targets=torch.from_numpy(has_targets.copy()),
    )
