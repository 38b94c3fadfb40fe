"""`train.compile`: which modules of a model are compiled, and which of them share their graphs.

Blocks are, those of towers as well. Experts, feed-forwards in tiles and layers with a state are edges inside of them
(ops/graphs.py); what these compute between their own matmuls is compiled by itself.
"""

import logging
from types import MethodType

import torch
from torch import nn

from omnizoo.models.experts import set_activation
from omnizoo.models.hf_private import expert_activation
from omnizoo.ops.device import is_host
from omnizoo.ops.graphs import COMPILED, Compiled, Kinds, make_edge
from omnizoo.ops.torch_private import missing_compiler
from omnizoo.recipes.base import Facts

log = logging.getLogger(__name__)


def kinds_for(device: torch.device) -> Kinds | None:
    """None where there is nothing to compile with."""
    missing = missing_compiler() if is_host(device) else None
    if missing is not None:
        log.warning("train.compile: blocks run without compilation, as there is no C++ compiler here (%s)", missing)
        return None
    return Kinds()


def compile_blocks(model: nn.Module, facts: Facts, kinds: Kinds) -> None:
    """Let the blocks of `model` (on meta, before they are recomputed or sharded) run as graphs."""
    for name in facts.experts:
        experts = model.get_submodule(name)
        activation = expert_activation(experts)
        if isinstance(activation, MethodType):
            set_activation(experts, kinds.of(experts, activation.__func__))
        make_edge(experts)
    for name in facts.blocks:
        block = model.get_submodule(name)
        if isinstance(block.forward, MethodType):
            block.forward = Compiled(block, kinds.of(block, block.forward.__func__))
            vars(block)[COMPILED] = True
        else:
            log.warning("train.compile: %s runs without compilation: its forward is no method", name)
    log.info("%d kinds of modules are compiled when they first run", len(kinds))
