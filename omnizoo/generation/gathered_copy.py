"""Unsharded copy of a sharded model on rank 0."""

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.checkpoint.weight_stream import stream_model_weights
from omnizoo.config.schema import Config
from omnizoo.models.build import MASTER_DTYPE
from omnizoo.models.hf_private import auto_class
from omnizoo.models.read_config import read_model_config
from omnizoo.models.user_module import tensors_of
from omnizoo.ops.device import is_host
from omnizoo.parallel.errors import sync_errors
from omnizoo.parallel.fsdp.shard import release
from omnizoo.parallel.mesh import Mesh


def whole_copy(model: nn.Module, config: Config, mesh: Mesh) -> PreTrainedModel | None:
    """Return an unsharded copy of a sharded model on the device of rank 0, and None on other ranks.

    An adapter is merged into the copy. Unlike the sharded model, the copy supports a KV cache. Collective: all ranks
    must call it.
    """
    copy = sync_errors(mesh, lambda: _empty_copy(config, mesh.device) if mesh.is_first else None)
    release(model)  # weights that are still gathered have the dtype of the forward pass
    targets = {} if copy is None else dict(tensors_of(copy))
    with torch.no_grad():
        for name, weight in stream_model_weights(model, mesh.is_first):
            targets.pop(name).copy_(weight)
    if copy is not None:
        assert not targets.keys() & copy.state_dict().keys(), f"weights without a value: {sorted(targets)[:3]}"
        if (settings := getattr(model, "generation_config", None)) is not None:
            copy.generation_config = settings
    return copy


def _empty_copy(config: Config, device: torch.device) -> PreTrainedModel:
    """Build the model as `load_whole` does, without weights from files.

    The weights that the constructor initializes are overwritten later. The random state of the run does not change.
    """
    read = read_model_config(config.model)
    builder = auto_class(read, config.model.trust_remote_code)
    assert builder is not None
    with torch.random.fork_rng(devices=[] if is_host(device) else [device]), device:
        copy = builder.from_config(
            read, dtype=MASTER_DTYPE[config.train.precision], trust_remote_code=config.model.trust_remote_code
        )
    assert isinstance(copy, PreTrainedModel)
    return nn.Module.to(copy, MASTER_DTYPE[config.train.precision])
