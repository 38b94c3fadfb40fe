"""AdamW of torch, applied to the local shards as plain tensors.

The update needs no communication. Given lists of DTensors, torch (2.13) would resolve the placement of each DTensor,
which takes seconds in the first step and some time in every later one.
"""

from typing import Any

import torch

from omnizoo.parallel.fsdp.sharded_tensors import local_shard


class ShardAdamW(torch.optim.AdamW):
    """AdamW whose state is sharded like the weights, for checkpoints. Only its kernels receive local shards."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_shard, tensors)
        return has_complex
