"""The description of an adapter and its base model for checkpoints and the log."""

from pathlib import Path
from typing import Any

from torch import nn

from omnizoo.config.hub import local_path
from omnizoo.config.schema import Config
from omnizoo.models.adapters.base_identity import base_identity, check_base_identity
from omnizoo.models.adapters.lora import KEY, attached
from omnizoo.models.adapters.peft_files import base_of
from omnizoo.ops.quantization import count_weights


def adapter_record(model: nn.Module, config: Config) -> dict[str, Any] | None:
    """Return the adapter of `model` and the identity of its base, for a checkpoint without base weights.

    Return None if the model has no adapter.
    """
    adapter = attached(model)
    if adapter is None:
        return None
    base = base_identity(config.model, config.train.seed)
    path = adapter.settings.path
    if path is not None:
        check_base_identity(base_of(Path(local_path(path))), base, f"{KEY}.path: {path}")
    folder = config.model.path or (config.model.foundation and config.model.foundation.path)
    return {"base": base, "path": folder, **adapter.fields()}


def describe_adapter(model: nn.Module) -> str:
    """Return a one-line description of the adapter of `model`, or "" if it has none."""
    adapter = attached(model)
    if adapter is None:
        return ""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trained = sum(sizes[name] for name in adapter.trained)
    num_targets = len(adapter.modules) + len(adapter.experts)
    base = f", base in {adapter.settings.base}" if adapter.settings.base else ""
    return (
        f"{adapter.settings.kind} of rank {adapter.settings.rank} on {num_targets} weights, {trained / 1e6:.2f} M "
        f"parameters trained ({trained / count_weights(model):.2%}){base}"
    )
