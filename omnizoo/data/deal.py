"""A step is dealt out: packs and prepared media items travel to the ranks that the plan has for them.

Every rank tells all others what it has read (lengths and costs, no data), so all come to the same plan. What a step
computes does not depend on any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omnizoo.data.flat_pack import FlatPack, filler, join_extra, join_weights
from omnizoo.data.plan import Round, Totals, plan_step
from omnizoo.data.told import Cost, Told, known_of, read_messages, starts, write_message
from omnizoo.modalities.base import Inputs, Port
from omnizoo.ops.device import pinned
from omnizoo.parallel.exchange import Payload, ProcessGroup, exchange_payloads, gather_bytes
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.route import Route

EXTRA = "extra."  # before the names of further numbers, on the way


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
    media: dict[Port, list[Inputs]]  # by port: the items this rank works on
    routes: dict[Port, Route]  # by port: where what it makes of them goes, and what comes to this rank's tokens
    weights: torch.Tensor | None = None  # [1, T] of the loss on each label; None: 1
    roles: Sequence[str] = ()  # of each sample, in preferences: what kind of answer it is; "": of none
    keys: Sequence[str] = ()  # of each sample, if asked for: a hash of its content; "": of what is no answer
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: [1, T] numbers for each label


@dataclass(frozen=True)
class Dealt:
    batches: list[Batch]
    totals: Totals
    imbalance: dict[str, float]  # busiest rank / mean over ranks: of packs (`tokens`), and of each port
    notes: list[Any]  # what each rank had to say besides
    mismatched: "Dealt | None" = None  # answers to other prompts, which are only looked at


def deal(
    packs: Sequence[FlatPack],
    mesh: Mesh,
    micro_batch: int,
    calls: Sequence[Sequence[Port]],
    cost: Cost,
    note: Any = None,
    group: ProcessGroup | None = None,
) -> Dealt:
    """Deal out the packs that all ranks have read; every rank must call. `note` is told to all ranks on the way.

    `calls` are the model's ports, by call of a module, whether or not this step has items for them. `group`: of the
    thread that calls.
    """
    ports = [port for call in calls for port in call]
    own_message = write_message(Told.of([known_of(pack) for pack in packs], ports, cost), note)
    told, notes = read_messages(gather_bytes(own_message, group))
    plan = plan_step(told, mesh.layout, micro_batch, calls, cost)

    received = exchange_payloads(outgoing(plan.rounds, {pack.index: pack for pack in packs}, mesh.layout), group)
    arrived: dict[int, FlatPack] = {}
    inputs: dict[tuple[int, int], Inputs] = {}
    for header, tensors in (payload for from_rank in received for payload in from_rank):
        if "item" in header:
            number, at = header["item"]
            inputs[number, at] = tensors
        else:
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
            extra = {name.removeprefix(EXTRA): arrays.pop(name) for name in list(arrays) if name.startswith(EXTRA)}
            pack = FlatPack(**header, **arrays, extra=extra)
            arrived[pack.index] = pack
    batches = []
    for number, each in enumerate(plan.rounds):
        own = [arrived.get(index) or filler(index) for index in each.packs[mesh.dp_rank]]
        media: dict[Port, list[Inputs]] = {port: [] for port in ports}
        for at, port in each.owned(mesh.rank):
            media[port].append({name: pinned(t, mesh.device) for name, t in inputs[number, at].items()})
        batches.append(make_batch(own, media, each.routes(mesh.rank)))
    return Dealt(batches, plan.totals, plan.imbalance, notes)


def outgoing(rounds: Sequence[Round], own: dict[int, FlatPack], layout: Layout) -> list[list[Payload]]:
    """What this rank has read, for each rank that needs it."""
    to: list[list[Payload]] = [[] for _ in range(layout.world)]
    for number, each in enumerate(rounds):
        # The numbers of items in this micro-batch go on from pack to pack.
        first_item = starts(each.told.packs["items"][each.rows].flatten())
        for d, packs in enumerate(each.packs):
            for slot, index in enumerate(packs):
                pack = own.get(index)
                if pack is not None:
                    some = {name: getattr(pack, name) for name in ("ids", "labels", "positions", "weights")}
                    arrays = {name: array for name, array in some.items() if array is not None}
                    arrays |= {EXTRA + name: numbers for name, numbers in pack.extra.items()}
                    header = {name: getattr(pack, name) for name in ("index", "lengths", "sample_ids", "roles", "keys")}
                    for rank in range(d * layout.sp, (d + 1) * layout.sp):
                        to[rank].append((header, arrays))
                    for at, item in enumerate(pack.items, int(first_item[d * len(packs) + slot])):
                        assert item.inputs is not None
                        to[each.owners[at]].append(({"item": [number, at]}, item.inputs))
    return to


def make_batch(
    packs: Sequence[FlatPack],
    media: dict[Port, list[Inputs]] | None = None,
    routes: dict[Port, Route] | None = None,
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
    weights = join_weights(packs)
    roles = [role for pack in packs for role in pack.roles or [""] * len(pack.lengths)]
    keys = [key for pack in packs for key in pack.keys or [""] * len(pack.lengths)]
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
        weights=None if weights is None else torch.from_numpy(weights)[None],
        roles=roles if any(roles) else (),
        keys=keys if any(keys) else (),
        extra={name: torch.from_numpy(numbers)[None] for name, numbers in join_extra(packs).items()},
    )
