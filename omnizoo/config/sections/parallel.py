"""Keys of `parallel`: the layout of ranks, and memory savings."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from omnizoo.config.sections.base import ConfigSection, Count


class RecomputeBudgetSettings(ConfigSection):
    """Memory budget that determines which blocks are recomputed."""

    budget: Annotated[float, Field(gt=0, le=1e6)]
    """memory for activations of blocks per rank: a fraction of the memory of the device if at most 1, else GiB"""


class ParallelSection(ConfigSection):
    """Keys of `parallel`."""

    dp_replicate: Count = 1
    """number of replicas of the sharded model (HSDP)"""

    dp_shard: Annotated[int, Field(le=2**20)] = -1
    """number of ranks that shard one replica (FSDP2) and process different packs; -1: all remaining ranks"""

    ulysses: Count = 1
    """number of ranks that share a pack and split attention by heads (sequence parallel, all-to-all)"""

    ring: Count = 1
    """number of ranks that share a pack and send keys and values around a ring (sequence parallel, any number of
    heads)"""

    ep: Count = 1
    """number of ranks that split the experts, a divisor of dp_shard x ulysses x ring"""

    overlap: bool = True
    """whether the all-to-alls of query, key and value start together instead of one after the other; the results are
    the same"""

    recompute: Literal["none", "full", "selective"] | RecomputeBudgetSettings = "none"
    """activation checkpointing: `full` recomputes whole blocks in backward, `selective` everything except attention,
    matmuls and all-to-alls, `{budget: 40}` as few blocks as the budget allows, by costs measured at start-up
    (docs/how-to/memory.md)"""

    offload: list[Literal["activations", "optimizer", "parameters"]] = Field([], max_length=8)
    """tensors in CPU memory: `activations` (copied back one block ahead of backward), `optimizer` (state, copied back
    for the update), `parameters` (copied when gathered; gradients and update stay on the CPU)
    (docs/how-to/memory.md)"""

    tile_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """maximum number of tokens that feed-forward layers and experts process at once, with recomputation in backward, so
    that the memory of these layers does not grow with the pack (docs/how-to/memory.md); default: all tokens"""

    reshard_after_forward: bool | None = None
    """whether to free gathered weights between forward and backward, which saves memory and costs one more all-gather;
    default: true, unless all weights fit into a sixteenth of the memory"""

    reduce_each_micro_batch: bool | None = None
    """whether to reduce-scatter gradients after every micro-batch, which saves memory and costs communication; default:
    true on accelerators, false on CPUs"""

    join_timeout: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """seconds that a rank waits at the start for the other ranks; after 10 seconds, it prints which ones are missing"""

    @model_validator(mode="after")
    def _check_dp_shard(self) -> "ParallelSection":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(
                f"parallel.dp_shard is {self.dp_shard}; expected a positive number, or -1 for all remaining ranks"
            )
        return self
