"""Fill the weights of a sharded model from folders, from a Python object, or by random initialization."""

import logging
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.models.adapters.lora import attached, set_magnitudes
from omnizoo.models.adapters.peft_files import read_factors
from omnizoo.models.user_module import given_model, tensors_of
from omnizoo.models.weights.load import WeightSource, grown_rows, load_published
from omnizoo.models.weights.random_init import build_drawn, initial_weights
from omnizoo.models.weights.vocabulary import with_published_rows
from omnizoo.parallel.fsdp.fill import allocate, broadcast_tensors, fill
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallelize.quantized_weights import load_and_quantize, plain_names, quantized

log = logging.getLogger(__name__)


def shard_device(mesh: Mesh, config: Config) -> torch.device:
    """Return the device that holds this rank's shards between steps."""
    return torch.device("cpu") if "parameters" in config.parallel.offload else mesh.device


def fill_weights(model: nn.Module, origins: Iterable[WeightSource], mesh: Mesh, config: Config, load: bool) -> None:
    """Allocate this rank's shards and fill them from folders, from the user's module, or by random initialization.

    Without `load`, only buffers that no checkpoint contains are filled.
    """
    device = shard_device(mesh, config)
    buffers = {name for name, _ in model.named_buffers()}
    missing = buffers - set(model.state_dict())
    adapter = attached(model)
    grown = grown_rows(model, origins, config.model) if load else {}
    for name, published in grown.items():
        rows = model.get_parameter(name).shape[0]
        log.info("%s has %d rows: %d published rows, and new rows for added tokens", name, rows, published.rows)
    if load:
        missing = buffers | plain_names(model)
        load_files = partial(load_published, model, origins, config.model, device, missing, grown)
        missing = load_and_quantize(model, load_files)
    allocate(model, mesh.device, of_shards=device)

    # Initialize in fp32 for every precision, so an fp64 run gets the same numbers. Buffers are computed in fp64 in an
    # fp64 run, because most of them are not random and need full precision.
    computed = missing & buffers if config.train.precision == "fp64" else set()
    if config.model.given is not None:
        tensors = dict(tensors_of(given_model(config.model)))
        needed = {name: tensor for name, tensor in tensors.items() if name in missing}
        fill(model, quantized(model, broadcast_tensors(needed, mesh)))
        missing &= adapter.started if adapter else set()
        computed = set()
    for precision, names in (("fp32", missing - computed), ("fp64", computed)):
        initial = initial_weights(partial(build_drawn, config.model, precision), config.train.seed, names)
        fill(model, quantized(model, with_published_rows(initial, grown)))
    if adapter is not None and load:  # initialize DoRA's magnitudes with row norms, or load another adapter
        set_magnitudes(model, adapter)
        if adapter.settings.path is not None:
            fill(model, read_factors(adapter))
