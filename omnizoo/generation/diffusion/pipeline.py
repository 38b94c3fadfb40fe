"""Sampling by the unmodified pipeline of a diffusion family, with trained transformers in place of those in its folder.

Each sample has its own generator on the CPU, so it depends on its prompt and seed only: not on the device, the other
prompts or the rank.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.conditioning.components import assemble_pipeline, load_component
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.ops.device import is_host

# Arguments of a pipeline's call that are set here, or that do not return finished media.
RESERVED = {"self", "generator", "latents", "output_type", "return_dict", "args", "kwargs"}


def load_pipeline(folder: PipelineFolder, denoisers: Mapping[str, nn.Module], device: torch.device) -> Any:
    """Load the pipeline of a folder, with its components in the precision of their files.

    `DiffusionPipeline.from_pretrained` is not used, because it ignores a transformer that is passed to it if the
    transformer is an optional component of the family.

    Args:
        folder: The folder.
        denoisers: Transformers to use in place of those in the folder, keyed by component name.
        device: The device. An accelerator holds one component at a time.
    """
    host = torch.device("cpu")
    components: dict[str, Any] = {}
    for name, component in folder.components.items():
        components[name] = denoisers[name] if name in denoisers else load_component(component, host)
    pipeline = assemble_pipeline(folder, components)
    pipeline.set_progress_bar_config(disable=True)
    if not is_host(device):
        pipeline.enable_model_cpu_offload(device=device)
    return pipeline


def check_arguments(folder: PipelineFolder, arguments: Mapping[str, Any], key: str) -> None:
    """Raise a `UserError` if the pipeline does not accept an argument by keyword, or if it is set elsewhere.

    Args:
        folder: The folder of the pipeline.
        arguments: Values by name.
        key: Config key or option of the arguments, for messages.
    """
    accepted = accepted_arguments(folder)
    for name in arguments:
        if name not in accepted:
            raise UserError(
                f"{key}: {folder.class_name} has no argument {name!r} that can be set here. It accepts "
                f"{', '.join(sorted(accepted))}."
            )


def accepted_arguments(folder: PipelineFolder) -> set[str]:
    """Return the names of the arguments of a pipeline that can be set."""
    parameters = set(inspect.signature(folder.pipeline_class.__call__).parameters) - RESERVED
    return {name for name in parameters if not name.endswith("_per_prompt")}


@torch.no_grad()
def sample(pipeline: Any, row: Mapping[str, Any], arguments: Mapping[str, Any], seed: int) -> Any:
    """Return the output of the pipeline for one prompt, with arrays in place of images.

    Args:
        pipeline: The pipeline.
        row: Arguments that belong to the row, such as `prompt`.
        arguments: Arguments for all rows, such as `num_inference_steps`.
        seed: Seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    return pipeline(**arguments, **row, generator=generator, output_type="np")
