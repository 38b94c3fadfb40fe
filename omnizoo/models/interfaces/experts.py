"""Registers `ops.experts` in transformers' experts interface as `dispatched`.

Other code sets attributes on the module that contains the experts of a layer. `dispatch` sends tokens to experts on
other ranks; without it, all experts are local. `compiled_activation` runs between the two matmuls. `tiles` enables
tiling.
"""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from omnizoo.models.adapters.expert_matrices import adapter_of
from omnizoo.models.adapters.quantized_base import local_part, packed_weight
from omnizoo.models.hf_private import expert_activation, register_experts
from omnizoo.ops.compiled_blocks import graph_break
from omnizoo.ops.experts import (
    Experts,
    by_expert,
    combine,
    gather,
    multiply_rows,
    run_experts,
    sort_by_expert,
)
from omnizoo.ops.memory.tiles import Tiles
from omnizoo.ops.quantization import Packed

DISPATCHED = "dispatched"


def use_dispatched(model: PreTrainedModel) -> None:
    """Make `model` run its experts with `dispatched`. Must be called before `fully_shard` renames classes."""
    model.set_experts_implementation(DISPATCHED)


@graph_break
def dispatched(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the chosen experts `top_k_index [tokens, choices]` on `hidden_states [tokens, width]`.

    Returns the sum of their outputs, weighted by `top_k_weights [tokens, choices]`: `[tokens, width]`.
    """
    tiles: Tiles | None = getattr(module, "tiles", None)
    if tiles is not None:
        return tiles(module, partial(_routed, module), hidden_states, top_k_index, top_k_weights)
    return _routed(module, hidden_states, top_k_index, top_k_weights)


def _routed(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Send tokens to their experts, run the experts, and combine the results."""
    compute = partial(_compute, module)
    dispatch = getattr(module, "dispatch", None)
    if dispatch is not None:
        out: torch.Tensor = dispatch(hidden_states, top_k_index, top_k_weights, compute)
        return out.to(hidden_states.dtype)

    pairs = sort_by_expert(top_k_index, module.num_experts)
    rows = compute(gather(hidden_states, pairs), pairs.counts, by_expert(top_k_weights, pairs))
    return combine(rows, pairs).to(hidden_states.dtype)


def _compute(module: Any, rows: torch.Tensor, counts: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """Run the experts on `rows [N, width]`, sorted by local expert, and multiply the outputs by `routing [N, 1]`."""
    up = "gate_up_proj" if module.has_gate else "up_proj"

    def weights(name: str) -> torch.Tensor | Packed:
        packed = packed_weight(module, name, not module.is_transposed)
        if packed is not None:
            return packed
        weight = local_part(getattr(module, name))
        return weight if module.is_transposed else weight.transpose(1, 2)

    def bias(name: str) -> torch.Tensor | None:
        return local_part(getattr(module, f"{name}_bias")) if module.has_bias else None

    experts = Experts(
        up=weights(up),
        down=weights("down_proj"),
        up_bias=bias(up),
        down_bias=bias("down_proj"),
        activate=getattr(module, "compiled_activation", None) or expert_activation(module),
        up_adapter=adapter_of(module, up, local_part),
        down_adapter=adapter_of(module, "down_proj", local_part),
    )
    assert len(experts.up) == len(counts), f"{len(experts.up)} local experts, but rows for {len(counts)} experts"
    if module.has_post_expert_norm:
        return multiply_rows(module.post_expert_norm(run_experts(rows, counts, experts)), routing)
    return run_experts(rows, counts, experts, routing)


register_experts(DISPATCHED, dispatched)
