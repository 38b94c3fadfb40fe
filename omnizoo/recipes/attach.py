"""`parallelize`: recipe + mesh + model on meta -> a sharded model with its weights, ready to train.

The order is fixed: recompute, shard, then memory and weights. Nothing of the model's own code is changed.
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

from omnizoo.config.schema import Config
from omnizoo.models.hf_private import conversion_mapping
from omnizoo.models.initial import initial_weights
from omnizoo.models.weights import load_weights
from omnizoo.ops.precision import exact
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import allocate, fill, shard
from omnizoo.recipes.base import infer_recipe


def parallelize(model: PreTrainedModel, mesh: Mesh, config: Config, load: bool = True) -> None:
    """Attach recompute and FSDP2/HSDP to `model` (on meta), then give it weights: from `model.path`, or drawn by seed.

    Each rank only ever holds its shards and one tensor (drawn weights: one block) besides. `load=False` leaves the
    weights undefined, for a checkpoint to fill; buffers that no checkpoint holds are computed all the same.
    """
    recipe = infer_recipe(model)
    skeleton = deepcopy(model)
    mapping = conversion_mapping(model)
    blocks = [model.get_submodule(name) for name in recipe.blocks]
    for block in blocks:
        recompute(block, config.parallel.recompute, config.parallel.precision)
    shard(model, blocks, mesh, config.parallel.precision, config.parallel.reshard_after_forward)

    buffers = {name for name, _ in model.named_buffers()}
    wanted = buffers - set(model.state_dict())
    if load:
        everything = buffers | {name for name, _ in model.named_parameters()}
        wanted |= load_weights(model, mapping, config.model, mesh.device) if config.model.path else everything
    allocate(model, mesh.device)
    fill(model, initial_weights(skeleton, recipe.blocks, config.train.seed, wanted))
    nn.Module.to(model, mesh.device)  # FSDP re-reads parameters that were replaced whenever a module is moved


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
