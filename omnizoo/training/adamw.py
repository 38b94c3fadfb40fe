"""torch's AdamW on this rank's shards, as the plain tensors that they are.

Its update needs nothing from other ranks. torch (2.13) would find out for lists of sharded tensors how each of them is
placed: seconds of the first step, and some of every later one.
"""

from typing import Any

import torch

from omnizoo.parallel.shard import local_of


class AdamW(torch.optim.AdamW):
    """The state is sharded as the weights are, for checkpoints; only what the kernel gets is local."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_of, tensors)
        return has_complex
