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

PIECE = 2**22  # elements per piece; an update needs several temporary fp32 copies of a piece
PIECE_ON_HOST = 2**15  # fits in the cache of a CPU
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBf16(torch.optim.Optimizer):
    """AdamW with bf16 moments. The arguments are the same as in torch, plus `names` and `seed`.

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
        self._names = names or {}
        self._seed = seed
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. Needs no collectives."""
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
        """Update the local shard of a parameter and of its moments, some rows at a time."""
        assert p.grad is not None
        shard = local_shard(p)
        if not shard.numel():
            return
        tensors = [shard, local_shard(p.grad), *(local_shard(state[moment]) for moment in MOMENTS)]
        rows, columns = global_indices(p)
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        wide = torch.promote_types(shard.dtype, torch.float32)
        first_key, second_key, weight_key = (self._key(name, step, tensor) for tensor in (*MOMENTS, "weight"))
        matrices = [tensor.view(len(rows), len(columns)) for tensor in tensors]
        num_elements = PIECE_ON_HOST if is_host(shard.device) else PIECE
        height = max(1, num_elements // len(columns))
        for begin in range(0, len(rows), height):
            piece = slice(begin, begin + height)
            weight, grad, first, second = (matrix[piece] for matrix in matrices)
            piece_rows = rows[piece]
            wide_grad = grad.to(wide)
            m = first.to(wide).lerp_(wide_grad, 1 - beta1)
            v = second.to(wide).mul_(beta2).addcmul_(wide_grad, wide_grad, value=1 - beta2)
            first.copy_(round_to_bf16(m, piece_rows, columns, first_key))
            second.copy_(round_to_bf16(v, piece_rows, columns, second_key))

            wide_weight = weight.to(wide) if weight.dtype != wide else weight
            wide_weight.mul_(1 - group["lr"] * group["weight_decay"])
            root = v.div_(1 - beta2**step).sqrt_().add_(group["eps"])
            wide_weight.addcdiv_(m, root, value=-group["lr"] / (1 - beta1**step))
            if wide_weight is not weight:
                weight.copy_(round_to_bf16(wide_weight, piece_rows, columns, weight_key))

    def _key(self, name: str, step: int, tensor: str) -> int:
        """Return the key of the random numbers for rounding a tensor (a moment or the weight) of a parameter."""
        digest = hashlib.blake2b(f"{self._seed}/{name}/{step}/{tensor}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big")


def global_indices(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int32 row and column indices of the local shard in the full tensor, viewed as a matrix.

    The columns are the last dim of the tensor, and the rows are all other dims.
    """
    shard = local_shard(tensor)
    offsets = offsets_of(tensor)

    def indices_along(dim: int) -> torch.Tensor:
        end = offsets[dim] + shard.shape[dim]
        return torch.arange(offsets[dim], end, dtype=torch.int32, device=shard.device)

    rows = torch.zeros(1, dtype=torch.int32, device=shard.device)
    if shard.ndim == 0:
        return rows, torch.zeros_like(rows)
    for dim in range(shard.ndim - 1):
        rows = (rows[:, None] * tensor.shape[dim] + indices_along(dim)).flatten()
    return rows, indices_along(shard.ndim - 1)
