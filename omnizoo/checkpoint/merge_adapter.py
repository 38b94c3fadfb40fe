"""Load the base model of an adapter, for exports and generation that merge the adapter into it."""

import logging
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omnizoo.checkpoint import manifest
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.hub.resolve import resolve_names
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.models.adapters.base_identity import base_identity, check_base_identity
from omnizoo.models.adapters.lora import attached, merge
from omnizoo.models.adapters.peft_files import base_of, read_factors
from omnizoo.models.build import build_model
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.user_module import is_own_module, tensors_of
from omnizoo.models.weights.load import load_published, load_whole, weight_origins
from omnizoo.models.weights.random_init import initial_weights
from omnizoo.parallel.fsdp.fill import allocate, fill

log = logging.getLogger(__name__)


def base_weights(source: Path, spec: ModelSection) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Return the base model of a checkpoint's adapter, and the model's weights by name. Both are in fp32 on the CPU.

    Args:
        source: A checkpoint with an adapter. The config of its run contains the path of the base weights.
        spec: Model section that builds the model from the checkpoint's model folder, with code that the user allows.

    Raises:
        UserError: If the base model is a user-defined module, has frozen tokenizers, or has changed since training.
    """
    config, _ = resolve_names(load_config(source / "config.yaml", []), with_data=False)
    state = manifest.read_state(source, manifest.read(source))
    if is_own_module(config.model) or config.model.given is not None:
        raise UserError(f"--merge: the base model of {source} is a user module. Merge the adapter in Python.")
    identity = base_identity(config.model, config.train.seed)
    check_base_identity(state["adapter"]["base"], identity, f"--merge: {source}")
    adapter = config.model.adapter
    if adapter is not None and adapter.base is not None:
        log.warning(
            "--merge: the adapter was trained on a base model quantized to %s, but is merged into the original weights",
            adapter.base,
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


def load_merged(spec: ModelSection, dtype: torch.dtype) -> PreTrainedModel:
    """Load the base model in `spec.path` on the CPU, and merge the PEFT adapter in `spec.adapter.path` into it.

    Raises:
        UserError: If the adapter was trained on another base model, or cannot be merged.
    """
    assert spec.adapter is not None
    assert spec.adapter.path is not None
    folder = Path(spec.adapter.path)
    skeleton = build_model(spec, "fp32")  # raises an error if the adapter does not fit the model
    check_base_identity(base_of(folder), base_identity(spec, seed=0), str(folder))
    adapter = attached(skeleton)
    assert adapter is not None

    model = load_whole(spec.model_copy(update={"adapter": None}), dtype)
    weights = dict(tensors_of(model))
    merged = dict(weights)
    merge(model, merged, adapter, dict(read_factors(adapter)))
    changed = {name: tensor for name, tensor in merged.items() if tensor is not weights.get(name)}
    with torch.no_grad():
        for name, tensor in changed.items():
            model.get_parameter(name).copy_(tensor)
    for name, tensor in changed.items():
        if not torch.equal(model.get_parameter(name), tensor.to(dtype)):
            raise UserError(
                f"{folder}: the adapter has separate values for {name}, which is tied to another weight of the base. "
                "Merge the adapter with PEFT, and pass the merged folder."
            )
    return model
