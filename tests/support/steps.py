"""Recurrent rules token by token, as their papers write them: what chunks and kernels are compared with."""

from collections.abc import Sequence

import torch


def step_by_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    lengths: Sequence[int],
    state: torch.Tensor,
    is_delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in `omnizoo.ops.linear_attention.recurrence.RecurrentInputs`; `state [N, H, K, V]` before each run."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out, after, at = [], [], 0
    for number, length in enumerate(lengths):
        s = state[number]
        for t in range(at, at + length):
            s = s * (g[t].exp()[:, None, None] if g.dim() == 2 else g[t].exp()[:, :, None])
            new = v[t] - torch.einsum("hk,hkv->hv", k[t], s) if is_delta else v[t]
            s = s + k[t][:, :, None] @ (b[t][:, None] * new)[:, None]
            out.append(torch.einsum("hk,hkv->hv", q[t], s))
        after.append(s)
        at += length
    return torch.stack(out), torch.stack(after)
