"""Write an adapter as `load_lora_weights` of diffusers reads it: one safetensors file with the config in its header.

Without the config, the loader would silently assume that alpha equals the rank.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from omnizoo.config.errors import UserError
from omnizoo.models.adapters.lora import AdapterInfo
from omnizoo.models.adapters.peft_files import BASE, PREFIX, file_names, peft_config

WEIGHTS = "pytorch_lora_weights.safetensors"
METADATA = "lora_adapter_metadata"
# The loader of a pair reads both transformers from this prefix (`load_into_transformer_2=True` selects the second).
TRANSFORMER = "transformer"


def write_lora_file(out: Path, adapter: AdapterInfo, state: Mapping[str, torch.Tensor], base: str) -> None:
    """Write the trained adapter matrices to `out / WEIGHTS`.

    Args:
        out: Existing folder.
        adapter: The adapter.
        state: Full tensors, keyed by their names in the model.
        base: Hash of the base model.

    Raises:
        UserError: If modules are fully trained, which the format does not support.
    """
    if adapter.saved:
        raise UserError(
            f"model.adapter.modules_to_save: {adapter.saved[0]} is fully trained, which LoRA files of diffusers cannot "
            "contain. Export with --merge."
        )
    tensors = {}
    for name, key in file_names(adapter).items():
        tensors[f"{TRANSFORMER}.{key.removeprefix(PREFIX)}"] = state[name].contiguous()
    config = peft_config(adapter, None).to_dict()
    fields = {f"{TRANSFORMER}.{key}": _as_json(value) for key, value in config.items()}
    header = {"format": "pt", METADATA: json.dumps(fields, indent=2, sort_keys=True), BASE: base}
    save_file(tensors, out / WEIGHTS, metadata=header)


def _as_json(value: object) -> object:
    """Return a list in place of a set."""
    return sorted(value) if isinstance(value, set) else value
