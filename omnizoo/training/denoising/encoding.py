"""Encode the items of a step with frozen components, and send them to the ranks that train on them.

Each item is encoded on the one rank to which the step plan has assigned it, so that encoding is balanced over ranks
too. Only latents and conditions are sent to the ranks that share the sample.
"""

from collections.abc import Sequence
from typing import Protocol

from omnizoo.balancing.batch import Batch
from omnizoo.modalities.item import Inputs, Port
from omnizoo.parallel.exchange import Payload, exchange_payloads
from omnizoo.parallel.mesh import Mesh


class ItemEncoder(Protocol):
    """Encodes prepared items: pixels become latents, prompts become conditions."""

    def encode(self, items: Sequence[Inputs]) -> list[Inputs]:
        """Return `mean`, `std` if there is one, and the conditions of each item, without a batch dimension."""


def encode_step(
    batches: Sequence[Batch], ports: Sequence[Port], encoder: ItemEncoder, mesh: Mesh
) -> list[dict[int, Inputs]]:
    """Encode the items of micro-batches, and exchange them. Collective: all ranks must call it.

    Args:
        batches: The micro-batches of this rank.
        ports: The ports of the model.
        encoder: Encodes the items that are assigned to this rank.
        mesh: The mesh of ranks.

    Returns:
        For each micro-batch, the encoded samples of this rank's sequence-parallel group, by their index.
    """
    items: list[Inputs] = []
    places: list[tuple[int, int, int]] = []  # micro-batch, data-parallel rank, index of the sample
    for number, batch in enumerate(batches):
        for port in ports:
            items += batch.media.get(port, [])
            places += [(number, *destination) for destination in batch.destinations.get(port, [])]
    encoded = encoder.encode(items)

    sp = mesh.layout.sp
    payloads: list[list[Payload]] = [[] for _ in range(mesh.layout.world)]
    for (number, dp_rank, index), sample in zip(places, encoded, strict=True):
        for rank in range(dp_rank * sp, (dp_rank + 1) * sp):
            payloads[rank].append(({"item": [number, index]}, sample))
    samples: list[dict[int, Inputs]] = [{} for _ in batches]
    for header, tensors in (payload for from_rank in exchange_payloads(payloads) for payload in from_rank):
        number, index = header["item"]
        samples[number][index] = tensors
    return samples
