"""Load frozen components of a pipeline folder, such as text encoders and autoencoders, and identify them by a hash.

Weights are computed in the precision in which they are stored, like `from_pretrained` of the pipeline with that dtype.
"""

import inspect
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from omnizoo.config.errors import UserError, first_line
from omnizoo.models.diffusion.pipeline_folder import Component, PipelineFolder
from omnizoo.models.untrusted_folders import open_weights
from omnizoo.models.weights.sampled_hash import add_sampled

# Fields of config.json that do not change what a component computes.
VOLATILE = ("_name_or_path", "_diffusers_version", "transformers_version", "dtype", "torch_dtype", "architectures")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # widest first


def load_component(component: Component, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Load a component. A model is frozen and in eval mode; a tokenizer or processor has no device.

    Args:
        component: The entry of the pipeline's index.
        device: Device of a model.
        dtype: Precision of a model; None for the precision of its files.

    Raises:
        UserError: If files are missing or damaged, or weights of the model are missing.
    """
    component_class = component.load_class()
    if not issubclass(component_class, nn.Module):
        try:
            return component_class.from_pretrained(component.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{component.key}: cannot load {component.folder}: {first_line(error)}") from error

    precision = dtype or stored_dtype(component.weight_files())
    name = "dtype" if component.library == "transformers" else "torch_dtype"
    try:
        model, info = component_class.from_pretrained(
            component.folder,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            low_cpu_mem_usage=component.library == "transformers",  # diffusers needs accelerate for it
            **{name: precision},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{component.key}: cannot load {component.folder}: {first_line(error)}") from error
    if info["missing_keys"]:
        listed = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"{component.key}: {component.folder} is missing weights of {component.class_name}: {listed}")
    return model.requires_grad_(False).eval().to(device)


def load_components(
    folder: PipelineFolder, names: Collection[str], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Load the components `names` of a pipeline. See `load_component`."""
    return {name: load_component(folder.component(name), device, dtype) for name in names}


def assemble_pipeline(folder: PipelineFolder, loaded: dict[str, Any]) -> Any:
    """Return an object of the pipeline's class with the components `loaded`. The others are None."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(folder.pipeline_class.__init__).parameters.items():
        if name == "self":
            continue
        if name in loaded:
            arguments[name] = loaded[name]
        elif name in folder.settings:
            arguments[name] = folder.settings[name]
        elif parameter.default is inspect.Parameter.empty:
            arguments[name] = None
    return folder.pipeline_class(**arguments)


def stored_dtype(files: Collection[Path]) -> torch.dtype:
    """Return the widest floating-point dtype in safetensors files."""
    with open_weights(files) as weights:
        stored = {str(weight.get_dtype()) for weight in weights.values()}
    return next((dtype for name, dtype in DTYPES.items() if name in stored), torch.float32)


@contextmanager
def frozen_computation(device: torch.device) -> Iterator[None]:
    """Context manager for the forward pass of a frozen component: no gradients and no autocast."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def component_hash(component: Component) -> str:
    """Return a hash of a component's files. It does not depend on the location of the folder.

    Only parts of large files are hashed, so a damaged byte may remain undetected.
    """
    digest = xxhash.xxh3_128()
    digest.update(component.class_name.encode())
    for file in sorted(component.folder.iterdir()):
        if file.name.startswith(".") or file.suffix == ".md" or not file.is_file():
            continue
        digest.update(file.name.encode())
        if file.name == "config.json":
            fields = {name: value for name, value in component.config.items() if name not in VOLATILE}
            digest.update(json.dumps(fields, sort_keys=True).encode())
        else:
            add_sampled(digest, file)
    return digest.hexdigest()
