"""A step is dealt out: packs to data-parallel ranks and media items to all ranks, each by cost.

Every rank tells all others what it has read (lengths and costs, no data); all come to the same plan; then packs and
prepared items travel to where they are needed. What a step computes does not depend on any of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from omnizoo.data.loader import IGNORE, FlatPack, filler
from omnizoo.modalities.base import Inputs
from omnizoo.parallel.assign import assign_items, assign_packs
from omnizoo.parallel.exchange import Payload, exchange_payloads, gather_json
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.route import Route, RoutedItem, Share, plan_routes

Cost = Callable[["Known"], float]  # of a pack -> FLOPs
TEXT = "text"


@dataclass(frozen=True)
class Batch:
    """One micro-batch on a rank: its packs one after the other, without padding (T = tokens), samples kept apart; and
    this rank's share of the media items of all ranks' micro-batches.

    labels are already shifted: labels[0, t] is the token after t, or -100 where that is no target or another sample's.
    """

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, from 0 in every sample; or [R, 1, T], perhaps fractions
    labels: torch.Tensor  # [1, T] int64
    pack_of_token: torch.Tensor  # [T] int64, which of `packs`; -1: a filler's
    cu_seqlens: torch.Tensor  # [samples + 1] int32, where samples begin
    max_seqlen: int
    sample_ids: list[str]  # source/epoch/row/part
    tokens: int
    packs: tuple[int, ...]  # their numbers in the run
    media: dict[str, list[Inputs]]  # by port: the items this rank works on
    routes: dict[str, Route]  # by port: where their rows go, and which rows come to this rank's tokens
    label_routes: dict[str, Route]  # the same for rows that are predicted, to the token before


@dataclass(frozen=True)
class Totals:
    """What the packs of all ranks hold together."""

    tokens: int
    packs: int
    targets: dict[str, int]  # of the text, and of each modality that is produced
    flops: float  # of packs and media items


@dataclass(frozen=True)
class Dealt:
    batches: list[Batch]
    totals: Totals
    imbalance: dict[str, float]  # busiest rank / mean over ranks: of packs (`tokens`), and of each port
    notes: list[Any]  # what each rank had to say besides


@dataclass(frozen=True)
class Item:
    """What all ranks know of a media item."""

    port: str
    rows: int
    cost: float
    targets: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Known:
    """What all ranks know of a pack."""

    index: int
    lengths: list[int]
    labels: int  # text targets
    is_filler: bool
    items: list[Item]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def rows(self, is_predicted: bool) -> dict[str, int]:
        """By modality that is produced: rows of its items; `is_predicted`: only of those that are to be learnt."""
        rows: dict[str, int] = {}
        for item in self.items:
            name, _, role = item.port.partition("/")
            if role == "decoder" and (item.targets or not is_predicted):
                rows[name] = rows.get(name, 0) + item.rows
        return rows


def deal(
    packs: Sequence[FlatPack], mesh: Mesh, micro_batch: int, ports: Sequence[str], cost: Cost, note: Any = None
) -> Dealt:
    """Deal out the packs that all ranks have read; every rank must call. `note` is told to all ranks on the way.

    `ports` are the model's, whether or not this step has items for them.
    """
    layout = mesh.layout
    told = gather_json({"note": note, "packs": [_tell(pack) for pack in packs]})
    notes = [rank["note"] for rank in told]
    known = sorted((_hear(pack) for rank in told for pack in rank["packs"]), key=lambda pack: pack.index)
    if not known:
        return Dealt([], Totals(0, 0, {}, 0.0), {}, notes)
    # Held-out packs need not divide evenly.
    known += [_hear(_tell(filler(-1 - i))) for i in range(-len(known) % (layout.dp * micro_batch))]
    costs = [cost(pack) for pack in known]
    # By cost on every rank, since ranks wait for each other in each micro-batch, not once a step.
    share = [sorted(own, key=lambda i: (-costs[i], i)) for own in assign_packs(costs, layout.dp)]
    rounds = [
        Round([[known[i] for i in own[first : first + micro_batch]] for own in share], layout, ports)
        for first in range(0, len(share[0]), micro_batch)
    ]
    slowest = sum(max(costs[i] for i in at_once) for at_once in zip(*share, strict=True))
    imbalance = {"tokens": slowest * layout.dp / sum(costs)} | media_imbalance(rounds, layout.world, ports)

    received = exchange_payloads(outgoing(rounds, {pack.index: pack for pack in packs}, layout))
    arrived: dict[int, FlatPack] = {}
    inputs: dict[tuple[int, int], Inputs] = {}
    for header, tensors in (payload for from_rank in received for payload in from_rank):
        if "item" in header:
            number, at = header["item"]
            inputs[number, at] = tensors
        else:
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
            pack = FlatPack(**header, **arrays)
            arrived[pack.index] = pack
    batches = []
    for number, each in enumerate(rounds):
        own = [arrived.get(pack.index) or filler(pack.index) for pack in each.packs[mesh.dp_rank]]
        mine = [(item.port, at) for at, item in enumerate(each.items) if each.owners[at] == mesh.rank]
        media = {port: [inputs[number, at] for of, at in mine if of == port] for port in ports}
        batches.append(make_batch(own, media, *each.routes(layout, mesh.rank)))
    real = [pack for pack in known if not pack.is_filler]
    targets = {TEXT: sum(pack.labels for pack in real)}
    for item in (item for pack in real for item in pack.items if item.port.endswith("/decoder")):
        name = item.port.partition("/")[0]
        targets[name] = targets.get(name, 0) + item.targets
    totals = Totals(
        tokens=sum(pack.tokens for pack in real),
        packs=len(real),
        targets=targets,
        flops=sum(cost(pack) + sum(item.cost for item in pack.items) for pack in real),
    )
    return Dealt(batches, totals, imbalance, notes)


class Round:
    """One micro-batch of all ranks: `packs[d]` are those of data-parallel rank d; items of all of them, and who works
    on each."""

    def __init__(self, packs: list[list[Known]], layout: Layout, ports: Sequence[str]) -> None:
        self.packs = packs
        self.items: list[Item] = []
        self.dp_of: list[int] = []  # of each item
        self.starts: list[int] = []  # of each item: where its pack begins in the micro-batch
        for d, own in enumerate(packs):
            start = 0
            for pack in own:
                self.items += pack.items
                self.dp_of += [d] * len(pack.items)
                self.starts += [start] * len(pack.items)
                start += pack.tokens
        self.owners = [0] * len(self.items)
        for port in ports:  # ranks wait for each other inside every encoder, so each is balanced by itself
            of_port = [at for at, item in enumerate(self.items) if item.port == port]
            assigned = assign_items([self.items[at].cost for at in of_port], layout.world)
            for at, rank in zip(of_port, assigned, strict=True):
                self.owners[at] = rank

    def routes(self, layout: Layout, rank: int) -> tuple[dict[str, Route], dict[str, Route]]:
        """Routes of the rows to their tokens, and of those to be predicted to the token before each."""
        of_dp: list[list[RoutedItem]] = [[] for _ in self.packs]
        learnt: list[list[RoutedItem]] = [[] for _ in self.packs]
        kept: dict[str, list[range]] = {}  # of the rows this rank makes, those to be predicted
        made: dict[str, int] = {}
        for item, dp, start, owner in zip(self.items, self.dp_of, self.starts, self.owners, strict=True):
            routed = RoutedItem(item.port, [(start + first, rows) for first, rows in item.spans], owner)
            of_dp[dp].append(routed)
            if item.targets:
                learnt[dp].append(routed)
            if owner == rank:
                first = made.get(item.port, 0)
                made[item.port] = first + item.rows
                kept.setdefault(item.port, []).extend([range(first, first + item.rows)] if item.targets else [])
        lengths = [[length for pack in own for length in pack.lengths] for own in self.packs]
        shares, labels = ([Share(*pair) for pair in zip(lengths, items, strict=True)] for items in (of_dp, learnt))
        predicted = plan_routes(layout, rank, labels, shift=-1)
        for port, route in predicted.items():
            rows = torch.tensor([row for rows in kept.get(port, []) for row in rows], dtype=torch.int64)
            predicted[port] = replace(route, order=rows[route.order])
        return plan_routes(layout, rank, shares), predicted


def media_imbalance(rounds: Sequence[Round], world: int, ports: Sequence[str]) -> dict[str, float]:
    """Of each port: the work of the busiest rank, summed over micro-batches, against the mean. 1 if there is none."""
    figures = {}
    for port in ports:
        busiest = total = 0.0
        for each in rounds:
            loads = [0.0] * world
            for item, owner in zip(each.items, each.owners, strict=True):
                loads[owner] += item.cost * (item.port == port)
            busiest, total = busiest + max(loads), total + sum(loads)
        figures[port] = busiest / (total / world) if total else 1.0
    return figures


def _tell(pack: FlatPack) -> dict[str, Any]:
    items = [[item.port, item.rows, item.cost, item.targets, item.spans] for item in pack.items]
    labels = int((pack.labels != IGNORE).sum())
    return {"index": pack.index, "lengths": pack.lengths, "labels": labels, "is_filler": not pack.sample_ids} | {
        "items": items
    }


def _hear(told: dict[str, Any]) -> Known:
    items = [
        Item(port, rows, cost, targets, tuple((first, count) for first, count in spans))
        for port, rows, cost, targets, spans in told["items"]
    ]
    return Known(**told | {"items": items})


def outgoing(rounds: Sequence[Round], own: dict[int, FlatPack], layout: Layout) -> list[list[Payload]]:
    """What this rank has read, for each rank that needs it."""
    to: list[list[Payload]] = [[] for _ in range(layout.world)]
    for number, each in enumerate(rounds):
        at = 0
        for d, packs in enumerate(each.packs):
            for known in packs:
                pack = own.get(known.index)
                if pack is not None:
                    arrays = {"ids": pack.ids, "labels": pack.labels}
                    arrays |= {} if pack.positions is None else {"positions": pack.positions}
                    header = {"index": pack.index, "lengths": pack.lengths, "sample_ids": pack.sample_ids}
                    for rank in range(d * layout.sp, (d + 1) * layout.sp):
                        to[rank].append((header, arrays))
                    for i, item in enumerate(pack.items):
                        to[each.owners[at + i]].append(({"item": [number, at + i]}, item.inputs))
                at += len(known.items)
    return to


def make_batch(
    packs: Sequence[FlatPack],
    media: dict[str, list[Inputs]] | None = None,
    routes: dict[str, Route] | None = None,
    label_routes: dict[str, Route] | None = None,
) -> Batch:
    lengths = np.array([length for pack in packs for length in pack.lengths])
    ends = np.cumsum(lengths)
    ids, labels = (np.concatenate([getattr(pack, k) for pack in packs]).astype(np.int64) for k in ("ids", "labels"))
    position = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    positions = torch.from_numpy(position)[None]
    several = [pack.positions for pack in packs if pack.positions is not None]
    if several:  # a filler has one position per token, as text has: the same in all rows
        counted = np.tile(np.arange(len(ids), dtype=several[0].dtype), (len(several[0]), 1))
        rows = [counted[:, : len(pack.ids)] if pack.positions is None else pack.positions for pack in packs]
        positions = torch.from_numpy(np.concatenate(rows, axis=1))[:, None]
        positions = positions if positions.is_floating_point() else positions.long()  # some families count in real time
    real = [pack for pack in packs if pack.sample_ids]
    place = {id(pack): number for number, pack in enumerate(real)}
    pack_of_token = np.repeat([place.get(id(pack), -1) for pack in packs], [len(pack.ids) for pack in packs])
    return Batch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=positions,
        labels=torch.from_numpy(labels)[None],
        pack_of_token=torch.from_numpy(pack_of_token),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        sample_ids=[id for pack in packs for id in pack.sample_ids],
        tokens=sum(len(pack.ids) for pack in real),
        packs=tuple(pack.index for pack in real),
        media=media or {},
        routes=routes or {},
        label_routes=label_routes or {},
    )
