"""The description of an adapter and its base model for checkpoints and the log."""

from pathlib import Path
from typing import Any

from torch import nn

from omnizoo.config.schema import Config
from omnizoo.models.adapters.base_identity import base_identity, check_base_identity
from omnizoo.models.adapters.lora import KEY, attached
from omnizoo.models.adapters.peft_files import base_of
from omnizoo.ops.quantization import count_weights


def adapter_record(model: nn.Module, config: Config) -> dict[str, Any] | None:
    """Return the adapter of `model` and the identity of its base, for a checkpoint without base weights.

    None if no adapter.
    """
    found = attached(model)
    if found is None:
        return None
    base, path = base_identity(config), found.settings.path
    if path is not None:
        check_base_identity(base_of(Path(path)), base, f"{KEY}.path: {path}")
    folder = config.model.path or (config.model.foundation and config.model.foundation.path)
    return {"base": base, "path": folder, **found.fields()}


def describe_adapter(model: nn.Module) -> str:
    """Return one line about the adapter of `model`, or "" if it has none."""
    found = attached(model)
    if found is None:
        return ""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trained = sum(sizes[name] for name in found.trained)
    places = len(found.modules) + len(found.experts)
    base = f", base in {found.settings.base}" if found.settings.base else ""
    return (
        f"{found.settings.kind} of rank {found.settings.rank} at {places} places, {trained / 1e6:.2f} M parameters "
        f"trained ({trained / count_weights(model):.2%}){base}"
    )
