"""`parallelize`: recipe + mesh + model on meta -> a sharded model with its weights, ready to train.

The order is fixed: experts, recompute, shard, then memory and weights. Nothing of the model's own code is changed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.models.experts import set_dispatch, use_dispatched
from omnizoo.models.hf_private import PACKED, attention_name, conversion_mapping
from omnizoo.models.initial import initial_weights
from omnizoo.models.weights import load_weights
from omnizoo.ops.precision import exact
from omnizoo.parallel.experts import Dispatch, check_experts, shard_experts
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import allocate, fill, precision_policy, shard
from omnizoo.parallel.ulysses import check_heads
from omnizoo.recipes.base import Facts, read_facts


def parallelize(model: nn.Module, mesh: Mesh, config: Config, load: bool = True) -> None:
    """Attach expert parallelism, recompute and FSDP2/HSDP to `model` (on meta), then give it weights.

    Weights come from `model.path`, or are drawn by seed. Each rank only ever holds its shards and one tensor (drawn
    weights: one block) besides. `load=False` leaves the weights undefined, for a checkpoint to fill; buffers that no
    checkpoint holds are computed all the same.
    """
    facts = read_facts(model)
    check(facts, mesh.layout, model)
    parallel = config.parallel
    skeleton = deepcopy(model)
    mapping = conversion_mapping(model)
    experts = [model.get_submodule(name) for name in facts.experts]
    blocks = [model.get_submodule(name) for name in facts.blocks]
    if experts:
        assert isinstance(model, PreTrainedModel)
        use_dispatched(model)
    for module in experts if mesh.layout.ep > 1 else ():
        set_dispatch(module, Dispatch(mesh.group("ep"), facts.num_experts))
    for block in blocks:
        recompute(block, parallel.recompute, parallel.precision)
    policy = precision_policy(parallel.precision)
    shard_experts(experts, mesh, parallel.reshard_after_forward, policy)
    shard(model, blocks, mesh, parallel.reshard_after_forward, policy)

    buffers = {name for name, _ in model.named_buffers()}
    wanted = buffers - set(model.state_dict())
    if load and config.model.path:
        assert isinstance(model, PreTrainedModel)
        wanted |= load_weights(model, mapping, config.model, mesh.device)
    elif load:
        wanted = buffers | {name for name, _ in model.named_parameters()}
    allocate(model, mesh.device)
    fill(model, initial_weights(skeleton, facts.blocks, config.train.seed, wanted))
    nn.Module.to(model, mesh.device)  # FSDP re-reads parameters that were replaced whenever a module is moved


def check(facts: Facts, layout: Layout, model: nn.Module) -> None:
    """Refuse a layout that this model cannot have, before anything is allocated."""
    if layout.sp > 1:
        if attention_name(model) != PACKED:
            raise UserError(
                f"parallel.ulysses {layout.ulysses} x ring {layout.ring}: sequence parallelism needs "
                f"model.attention: auto (it is {attention_name(model)})"
            )
        if facts.heads:
            check_heads(layout, facts.heads, facts.kv_heads)
    if layout.ep > 1 and not facts.experts:
        raise UserError(f"parallel.ep: {layout.ep}, but {type(model).__name__} has no experts; set parallel.ep: 1")
    if facts.experts:
        check_experts(layout, facts.num_experts)


def recompute(block: nn.Module, mode: str, precision: str) -> None:
    """Recompute the block's activations in backward: all of them, or (selective) all but matmuls and attention."""
    if mode == "none":
        return

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = nullcontext(), nullcontext()
        if mode == "selective":
            first, again = create_selective_checkpoint_contexts(_keep_expensive)
        return first, _both(again, exact(precision))  # autograd leaves the mode that the forward pass ran under

    # On the instance, inside the module's hooks: FSDP gathers the weights before the recomputation needs them.
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keep_expensive(_: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    expensive = any(part in op.name() for part in ("mm", "attention", "attn"))
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
