"""Keys of `parallel`: the layout of ranks, and memory savings."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from omnizoo.config.sections.base import ConfigSection, Count


class RecomputeBudgetSettings(ConfigSection):
    """Memory budget that determines which blocks are recomputed."""

    budget: Annotated[float, Field(gt=0, le=1e6)]
    """Memory for the activations of blocks on each rank. A value up to 1 is a fraction of the rank's memory; a larger
    value is in GiB."""


class ParallelSection(ConfigSection):
    """Keys of `parallel`."""

    dp_replicate: Count = 1
    """Number of replicas of the sharded model (HSDP). Use the number of nodes to keep weight all-gathers inside a
    node."""

    dp_shard: Annotated[int, Field(le=2**20)] = -1
    """Number of ranks that shard each replica (FSDP2) and process different packs. -1 uses all ranks that the other
    axes leave."""

    ulysses: Count = 1
    """Number of ranks that share a pack and split attention by heads, with all-to-alls (sequence parallelism). Use it
    for long packs, inside a node."""

    ring: Count = 1
    """Number of ranks that share a pack and pass keys and values around a ring (sequence parallelism). Use it for long
    packs if there are more ranks than `ulysses` can use; the number of heads does not limit it."""

    ep: Count = 1
    """Number of ranks that divide the experts of MoE layers among them. It must be a divisor of `dp_shard` x `ulysses`
    x `ring`."""

    overlap: bool = True
    """Whether the all-to-alls of query, key and value start together instead of one after the other. The results are
    the same."""

    recompute: Literal["none", "full", "selective"] | RecomputeBudgetSettings = "none"
    """Activations that the backward pass recomputes instead of keeping them in memory (activation checkpointing).
    `full` recomputes whole blocks. `selective` recomputes everything except attention, matmuls and all-to-alls.
    `{budget: 40}` recomputes as little as a memory budget allows, based on costs that are measured at the start
    (docs/how-to/memory.md)."""

    offload: list[Literal["activations", "optimizer", "parameters"]] = Field([], max_length=8)
    """Tensors to keep in CPU memory. `activations` are copied back one block before backward needs them. `optimizer`
    state is copied back for each update. `parameters` are copied to the device when they are gathered, and the update
    runs on the CPU (docs/how-to/memory.md)."""

    tile_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Maximum number of tokens that feed-forward layers and experts process at once. Set it for long packs: the memory
    for activations of these layers then does not grow with the pack, but backward recomputes them
    (docs/how-to/memory.md). Default: all tokens at once."""

    reshard_after_forward: bool | None = None
    """Whether to free the gathered weights of a block between forward and backward. This saves memory and costs one
    more all-gather. Default: true, unless all weights together fit into a sixteenth of the rank's memory."""

    reduce_each_micro_batch: bool | None = None
    """Whether to reduce-scatter gradients after every micro-batch instead of once per step. This saves memory and costs
    communication. Default: true on accelerators, false on CPUs."""

    join_timeout: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """Number of seconds that a rank waits for the other ranks when the run starts. After 10 seconds, it prints which
    ranks are missing."""

    @model_validator(mode="after")
    def _check_dp_shard(self) -> "ParallelSection":
        """Check that `dp_shard` is positive or -1."""
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(
                f"parallel.dp_shard is {self.dp_shard}; expected a positive number, or -1 for all remaining ranks"
            )
        return self
