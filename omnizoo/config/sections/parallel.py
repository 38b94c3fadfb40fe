"""Keys of `parallel`: the layout of ranks, and memory savings."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from omnizoo.config.sections.base import ConfigSection, Count


class RecomputeBudgetSettings(ConfigSection):
    budget: Annotated[float, Field(gt=0, le=1e6)]
    """memory for activations of blocks on each rank: up to 1, a fraction of its memory; above 1, GiB"""


class ParallelSection(ConfigSection):
    dp_replicate: Count = 1
    """number of replicas of the sharded model (HSDP)"""

    dp_shard: Annotated[int, Field(le=2**20)] = -1
    """ranks that shard one replica (FSDP2) and process different packs; -1: all remaining ranks"""

    ulysses: Count = 1
    """ranks that share a pack and split its attention by heads (sequence parallel, all-to-all)"""

    ring: Count = 1
    """ranks that share a pack and pass keys and values around (sequence parallel, any head count)"""

    ep: Count = 1
    """ranks that split the experts; divides dp_shard x ulysses x ring"""

    overlap: bool = True
    """start the all-to-alls of query, key and value together; false: one after the other, same results"""

    recompute: Literal["none", "full", "selective"] | RecomputeBudgetSettings = "none"
    """activation checkpointing: `full` recomputes whole blocks in backward, `selective` all but attention, matmuls and
    all-to-alls; `{budget: 40}` recomputes as few blocks as the budget allows, by costs that are measured at the start
    (docs/memory.md)"""

    offload: list[Literal["activations", "optimizer", "parameters"]] = Field([], max_length=8)
    """what is kept in CPU memory: `activations` return one block ahead of backward, `optimizer` state returns for the
    update only, `parameters` are copied when they are gathered, and gradients and update stay on the CPU
    (docs/memory.md)"""

    tile_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """maximum number of tokens that feed-forward layers and experts process at once; they are recomputed in backward,
    so their memory does not grow with the pack (docs/memory.md); default: all at once"""

    reshard_after_forward: bool | None = None
    """free gathered weights between forward and backward: less memory, one more all-gather; default: true, unless all
    weights fit into a sixteenth of the memory"""

    reduce_each_micro_batch: bool | None = None
    """reduce-scatter gradients after every micro-batch: less memory, more communication; default: true on accelerators,
    false on CPUs"""

    @model_validator(mode="after")
    def _check_dp_shard(self) -> "ParallelSection":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(f"parallel.dp_shard is {self.dp_shard}; give a positive number, or -1 for what is left")
        return self
