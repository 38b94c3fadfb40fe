"""AdamW with both moments in bf16 and stochastic rounding: 4 bytes of state per weight instead of 8.

A step changes a moment by less than the resolution of bf16, so rounding to nearest would leave it unchanged. Stochastic
rounding is unbiased. The update is computed in at least fp32, from moments before rounding. bf16 weights are rounded
stochastically, too.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omnizoo.ops.device import is_host
from omnizoo.ops.stochastic_rounding import round_to_bf16
from omnizoo.parallel.fsdp.sharded_tensors import local_shard, offsets_of

PIECE = 2**22  # elements per piece: temporary tensors are several fp32 copies of it
PIECE_ON_HOST = 2**15  # fits in the cache of a CPU
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with bf16 moments. The arguments are those of torch, with `names` and `seed` in addition.

    Stochastic rounding depends on the name of the parameter, the seed and the step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        names: Mapping[torch.Tensor, str] | None = None,
        seed: int = 0,
    ) -> None:
        self._names, self._seed = names or {}, seed
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name in MOMENTS:
                        state[name] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                self._update(p, group, state, self._names.get(p, str(number)))

    def _update(self, p: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, torch.Tensor], name: str) -> None:
        assert p.grad is not None
        tensors = [local_shard(p), local_shard(p.grad), *(local_shard(state[moment]) for moment in MOMENTS)]
        if not tensors[0].numel():
            return
        rows, columns = places(p)
        step = int(state["step"])
        keys = [self._key(name, step, what) for what in (*MOMENTS, "weight")]
        matrices = [tensor.view(len(rows), len(columns)) for tensor in tensors]
        height = max(1, (PIECE_ON_HOST if is_host(tensors[0].device) else PIECE) // len(columns))
        for begin in range(0, len(rows), height):
            weight, grad, first, second = (matrix[begin : begin + height] for matrix in matrices)
            at = rows[begin : begin + height], columns
            wide = torch.promote_types(weight.dtype, torch.float32)
            beta1, beta2 = group["betas"]
            m = first.to(wide).lerp_(grad.to(wide), 1 - beta1)
            v = second.to(wide).mul_(beta2).addcmul_(grad.to(wide), grad.to(wide), value=1 - beta2)
            first.copy_(round_to_bf16(m, *at, keys[0]))
            second.copy_(round_to_bf16(v, *at, keys[1]))
            moved = weight.to(wide) if weight.dtype != wide else weight
            moved.mul_(1 - group["lr"] * group["weight_decay"])
            root = v.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            moved.addcdiv_(m, root, value=-group["lr"] / (1 - beta1**step))
            if moved is not weight:
                weight.copy_(round_to_bf16(moved, *at, keys[2]))

    def _key(self, name: str, step: int, what: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{step}/{what}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big")


def places(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and column indices, int32, of the local shard in the full tensor, viewed as a matrix.

    The columns are the last dim of the tensor, and the rows are all other dims.
    """
    here, offsets = local_shard(tensor), offsets_of(tensor)
    device = here.device

    def along(dim: int) -> torch.Tensor:
        return torch.arange(offsets[dim], offsets[dim] + here.shape[dim], dtype=torch.int32, device=device)

    if here.ndim == 0:
        return torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    for dim in range(here.ndim - 1):
        rows = (rows[:, None] * tensor.shape[dim] + along(dim)).flatten()
    return rows, along(here.ndim - 1)
