"""Send packs and decoded media items to the ranks that the step plan assigns them to.

First, every rank sends the metadata of its packs (lengths and costs, no token data) to all others, so that all ranks
compute the same plan. The plan only affects speed: the result of a step does not depend on it.
"""

from collections.abc import Sequence
from typing import Any

from omnizoo.balancing.batch import Batch, collate
from omnizoo.balancing.pack_metadata import Cost, PackTable, decode_messages, encode_message, offsets
from omnizoo.balancing.step_plan import MicroBatchPlan, StepPlan, plan_step
from omnizoo.data.packing.pack import Pack, dummy_pack
from omnizoo.data.sample import Preferences
from omnizoo.modalities.item import Inputs, Port
from omnizoo.ops.device import pinned
from omnizoo.parallel.exchange import Payload, ProcessGroup, Received, exchange_payloads, gather_bytes
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh

# Fields of a pack that are sent along with its columns.
HEADER = ("index", "lengths", "sample_ids", "preferences", "sources", "batch_shape")


def redistribute(
    packs: Sequence[Pack],
    mesh: Mesh,
    micro_batch: int,
    calls: Sequence[Sequence[Port]],
    cost: Cost,
    status: Any = None,
    group: ProcessGroup | None = None,
) -> tuple[list[Batch], StepPlan, list[Any]]:
    """Send the packs that all ranks have loaded to the ranks that train on them. Collective: all ranks must call it.

    Args:
        packs: The packs that this rank has loaded.
        mesh: The device mesh of all ranks.
        micro_batch: Number of packs in a micro-batch of one data-parallel rank.
        calls: All ports of the model, grouped by module call. Ports without items in this step are included.
        cost: Returns the FLOPs of a pack.
        status: Status of this rank, as a value that JSON can represent. All ranks receive it.
        group: Process group to communicate over; None for the default group. Each thread needs a separate group.

    Returns:
        The micro-batches of this rank, the plan of the step, and the status of each rank.
    """
    ports = [port for call in calls for port in call]
    message = encode_message(PackTable.from_packs(packs, ports, cost), status)
    pack_table, statuses = decode_messages(gather_bytes(message, group))
    plan = plan_step(pack_table, mesh.layout, micro_batch, calls, cost)
    payloads = payloads_by_rank(plan.rounds, {pack.index: pack for pack in packs}, mesh.layout)
    received_packs, inputs = _unpack(exchange_payloads(payloads, group))
    batches = []
    for number, micro_batch_plan in enumerate(plan.rounds):
        indices = micro_batch_plan.packs[mesh.dp_rank]
        local_packs = [received_packs.get(index) or dummy_pack(index) for index in indices]
        media: dict[Port, list[Inputs]] = {port: [] for port in ports}
        destinations: dict[Port, list[tuple[int, int]]] = {port: [] for port in ports}
        sources: dict[Port, list[int]] = {port: [] for port in ports}
        for item, port in micro_batch_plan.owned(mesh.rank):
            item_inputs = inputs[number, item]
            media[port].append({name: pinned(tensor, mesh.device) for name, tensor in item_inputs.items()})
            destinations[port].append(micro_batch_plan.destination(item))
            sources[port].append(micro_batch_plan.source_of(item))
        batches.append(collate(local_packs, media, micro_batch_plan.routes(mesh.rank), destinations, sources))
    return batches, plan, statuses


def payloads_by_rank(rounds: Sequence[MicroBatchPlan], packs: dict[int, Pack], layout: Layout) -> list[list[Payload]]:
    """Return the packs and media items that this rank sends to each rank.

    Args:
        rounds: The plan of each micro-batch.
        packs: The packs that this rank has loaded, keyed by their index.
        layout: Sizes of the mesh axes.

    Returns:
        For each rank, its packs and media items. Each one is a header and named arrays.
    """
    payloads: list[list[Payload]] = [[] for _ in range(layout.world)]
    for number, micro_batch_plan in enumerate(rounds):
        # Items are numbered consecutively over all packs of the micro-batch.
        num_items = micro_batch_plan.table.packs["num_items"][micro_batch_plan.rows]
        first_item = offsets(num_items.flatten())
        for dp_rank, indices in enumerate(micro_batch_plan.packs):
            for slot, index in enumerate(indices):
                pack = packs.get(index)
                if pack is None:
                    continue
                header = {name: getattr(pack, name) for name in HEADER}
                for rank in range(dp_rank * layout.sp, (dp_rank + 1) * layout.sp):
                    payloads[rank].append((header, pack.columns))
                first = int(first_item[dp_rank * len(indices) + slot])
                for item_number, item in enumerate(pack.items, first):
                    assert item.inputs is not None
                    owner = micro_batch_plan.owners[item_number]
                    payloads[owner].append(({"item": [number, item_number]}, item.inputs))
    return payloads


def _unpack(received: Sequence[Sequence[Received]]) -> tuple[dict[int, Pack], dict[tuple[int, int], Inputs]]:
    """Return the packs and media items that this rank has received.

    Returns:
        The packs, keyed by their index, and the inputs of media items, keyed by the number of the micro-batch and the
        number of the item in it.
    """
    packs: dict[int, Pack] = {}
    inputs: dict[tuple[int, int], Inputs] = {}
    for header, tensors in (payload for from_rank in received for payload in from_rank):
        if "item" in header:
            number, item_number = header["item"]
            inputs[number, item_number] = tensors
            continue
        if header["preferences"] is not None:  # JSON has converted the named tuple to a list
            header["preferences"] = Preferences(*header["preferences"])
        header["batch_shape"] = tuple(header["batch_shape"])
        columns = {name: tensor.numpy() for name, tensor in tensors.items()}
        packs[header["index"]] = Pack(**header, columns=columns)
    return packs, inputs
