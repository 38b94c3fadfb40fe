"""Load the base model of an adapter, for exports that merge the adapter into it."""

import logging
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnizoo.checkpoint import manifest
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.models.adapters.base_identity import base_identity, check_base_identity
from omnizoo.models.build import build_model
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.user_module import is_own_module, tensors_of
from omnizoo.models.weights.load import load_published, weight_origins
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.parallel.fsdp.fill import allocate, fill

log = logging.getLogger(__name__)


def base_weights(source: Path, spec: ModelSection) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Return the base model of a checkpoint's adapter, on the CPU, and its weights by name, in fp32.

    Args:
        source: A checkpoint with an adapter. The config of its run contains the path of the base weights.
        spec: Model section that builds the model from the checkpoint's model folder, with code that the user allows.

    Raises:
        UserError: If the base model is a user-defined module, has frozen tokenizers, or has changed since training.
    """
    config = load_config(source / "config.yaml", [])
    state = manifest.read_state(source, manifest.read(source))
    if is_own_module(config.model) or config.model.given is not None:
        raise UserError(f"--merge: the base model of {source} is a user module. Merge the adapter in Python.")
    check_base_identity(state["adapter"]["base"], base_identity(config), f"--merge: {source}")
    adapter = config.model.adapter
    if adapter is not None and adapter.base is not None:
        log.warning(
            "--merge: the adapter was trained on a base in %s, but is merged into the original base", adapter.base
        )
    model = build_model(spec, "fp32")
    if any(isinstance(module, Frozen) for module in model.modules()):
        raise UserError(
            f"--merge: the base model of {source} has frozen tokenizers from other folders, which is not supported. "
            "Export the adapter without --merge."
        )
    origins = weight_origins(model, media_model(model), config.model)
    names = {name for name, _ in tensors_of(model)}
    missing = load_published(model, origins, config.model, torch.device("cpu"), names)
    allocate(model, torch.device("cpu"))
    fill(model, initial_weights(partial(build_model, spec, "fp32"), config.train.seed, missing))
    assert isinstance(model, PreTrainedModel)
    persistent = set(model.state_dict())
    return model, {name: tensor.detach() for name, tensor in tensors_of(model) if name in persistent}
