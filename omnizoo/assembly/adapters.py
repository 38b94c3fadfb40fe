"""What a run with an adapter does besides: where factors begin, and which base they belong to."""

from pathlib import Path
from typing import Any

from torch import nn

from omnizoo.config.schema import Config
from omnizoo.models.adapter import KEY, Attached, attached, set_magnitudes
from omnizoo.models.adapter_files import base_of, read_factors
from omnizoo.models.base_identity import base_identity, check_base_identity
from omnizoo.parallel.shard import fill


def adapter_record(model: nn.Module, config: Config) -> dict[str, Any] | None:
    """What a checkpoint tells of the adapter of `model` and of its base, which it does not hold. None without one."""
    found = attached(model)
    if found is None:
        return None
    base, path = base_identity(config), found.settings.path
    if path is not None:
        check_base_identity(base_of(Path(path)), base, f"{KEY}.path: {path}")
    return {"base": base, **found.fields()}


def begin_adapter(model: nn.Module, adapter: Attached) -> None:
    """What an adapter begins with, besides what is drawn: the lengths of rows, or the folder of another adapter."""
    set_magnitudes(model, adapter)
    if adapter.settings.path is not None:
        fill(model, read_factors(adapter))
