"""Implements `train.compile`: selects the modules to compile, and the modules that share compiled graphs.

Blocks are compiled, including blocks of encoders. Experts, tiled feed-forward layers and recurrent layers break the
graph (ops/compiled_blocks.py). The computation between the matmuls of experts, and the content of a tile, are compiled
separately.
"""

import logging
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from omnizoo.models.hf_private import expert_activation
from omnizoo.models.recipe import ModelFacts
from omnizoo.ops.compiled_blocks import COMPILED, Compiled, Kinds, make_graph_break
from omnizoo.ops.device import is_host
from omnizoo.ops.torch_private import missing_compiler

log = logging.getLogger(__name__)


def kinds_for(device: torch.device) -> Kinds | None:
    """Return an empty registry of compiled modules, or None if the machine has no compiler."""
    missing = missing_compiler() if is_host(device) else None
    if missing is not None:
        log.warning("train.compile: blocks run without compilation, because no C++ compiler was found (%s)", missing)
        return None
    return Kinds()


def compile_blocks(model: nn.Module, facts: ModelFacts, kinds: Kinds) -> None:
    """Compile the blocks of `model` (on meta). Must be called before blocks are recomputed or sharded."""
    for name in facts.experts:
        experts: Any = model.get_submodule(name)
        activation = expert_activation(experts)
        if isinstance(activation, MethodType):
            experts.compiled_activation = partial(kinds.kind_of(experts, activation.__func__), experts)
        make_graph_break(experts)
    for name in facts.blocks:
        block = model.get_submodule(name)
        if isinstance(block.forward, MethodType):
            block.forward = Compiled(block, kinds.kind_of(block, block.forward.__func__))
            vars(block)[COMPILED] = True
        else:
            log.warning("train.compile: %s runs without compilation, because its forward is not a method", name)
    log.info("train.compile: %d kinds of modules will be compiled when they first run", len(kinds))
