"""Make an unsharded copy of a sharded model on rank 0."""

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.checkpoint.weight_stream import stream_model_weights
from omnizoo.config.schema import Config
from omnizoo.models.build import MASTER_DTYPE
from omnizoo.models.diffusion.denoiser import build_denoiser, read_denoiser
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.models.diffusion.write_pipeline import published_dtypes
from omnizoo.models.hf_private import auto_class
from omnizoo.models.read_config import read_model_config
from omnizoo.models.recipe import store_recipe
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
    release(model)  # free gathered weights: they have the dtype of the forward pass, not the stored dtype

    unfilled = {} if copy is None else dict(tensors_of(copy))
    with torch.no_grad():
        for name, weight in stream_model_weights(model, mesh.is_first):
            unfilled.pop(name).copy_(weight)

    if copy is not None:
        assert not unfilled.keys() & copy.state_dict().keys(), f"weights without a value: {sorted(unfilled)[:3]}"
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None:
            copy.generation_config = generation_config
    return copy


def whole_denoisers(
    model: nn.Module, config: Config, folder: PipelineFolder, mesh: Mesh
) -> dict[str, nn.Module] | None:
    """Return unsharded copies of the trained transformers on rank 0, by component of the pipeline; None on other ranks.

    An adapter is merged into them, and weights have the precision of the published ones, as in an export. Collective:
    all ranks must call it.
    """
    copy = sync_errors(mesh, lambda: _empty_denoiser(config) if mesh.is_first else None)
    release(model)
    unfilled = {} if copy is None else dict(copy.named_parameters()) | dict(copy.named_buffers())
    with torch.no_grad():
        for name, weight in stream_model_weights(model, mesh.is_first):
            unfilled[name].copy_(weight)
    if copy is None:
        return None
    names = list(read_denoiser(config.model).configs)
    copies = {name: copy.get_submodule(name) for name in names} if len(names) > 1 else {names[0]: copy}
    for name, transformer in copies.items():
        dtypes = published_dtypes(folder.component(name))
        for key, parameter in transformer.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(key) or parameter.dtype)
        transformer.requires_grad_(False).eval()
    return copies


def _empty_denoiser(config: Config) -> nn.Module:
    """Build the transformers on the CPU, where the pipeline moves them to the device when it needs them."""
    with torch.random.fork_rng(devices=[]):
        return build_denoiser(config.model, "cpu")


def _empty_copy(config: Config, device: torch.device) -> PreTrainedModel:
    """Build the model as `load_whole` does, but without loading weights from files.

    `whole_copy` overwrites the weights that the constructor initializes. The global random state does not change.
    """
    model_config = read_model_config(config.model)
    trust_remote_code = config.model.trust_remote_code
    dtype = MASTER_DTYPE[config.train.precision]
    builder = auto_class(model_config, trust_remote_code)
    assert builder is not None
    rng_devices = [] if is_host(device) else [device]
    with torch.random.fork_rng(devices=rng_devices), device:
        copy = builder.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code)
    assert isinstance(copy, PreTrainedModel)
    store_recipe(copy, config.model)
    return nn.Module.to(copy, dtype)
