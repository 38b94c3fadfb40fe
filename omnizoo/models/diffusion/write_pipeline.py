"""Export trained transformers in a copy of their pipeline folder, which `DiffusionPipeline.from_pretrained` loads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from omnizoo.config.errors import UserError
from omnizoo.models.diffusion.pipeline_folder import INDEX, Component, PipelineFolder
from omnizoo.models.export_files import DTYPES
from omnizoo.models.untrusted_folders import open_weights

MAX_FILE_SIZE = "10GB"  # maximum size of a weight file, as in published pipelines
# Files of a component that are copied: settings, tokenizers and safetensors, but neither code nor pickles.
COPIED = {".json", ".txt", ".model", ".jinja", ".safetensors", ".md"}

Weights = Mapping[str, torch.Tensor]


def write_pipeline(
    out: Path, folder: PipelineFolder, states: Mapping[str, Weights], dtype: torch.dtype | None = None
) -> None:
    """Write a pipeline folder with trained transformers. All other components are copied.

    Args:
        out: New folder.
        folder: The pipeline that training started from.
        states: Full tensors of the trained transformers, keyed by component name.
        dtype: Precision of the weights, except those that diffusers keeps in fp32. None keeps that of each published
            weight, or of the state if there are no published weights.

    Raises:
        UserError: If tensors are missing, or the pipeline has no such component.
    """
    out.mkdir(parents=True)
    shutil.copyfile(folder.path / INDEX, out / INDEX)
    for name, component in folder.components.items():
        if name in states:
            write_denoiser(out / name, component, states[name], dtype)
        else:
            _copy_component(component.folder, out / name)


def write_denoiser(out: Path, component: Component, state: Weights, dtype: torch.dtype | None) -> None:
    """Write the config and the weights of one transformer, as `from_pretrained` of its class reads them."""
    model_class = component.load_class()
    with torch.device("meta"):
        model = model_class.from_config(component.config)
    missing = [name for name in model.state_dict() if name not in state]
    if missing:
        raise UserError(f"{component.name}: the trained weights lack {missing[0]}. Export another checkpoint.")
    dtypes = dict.fromkeys(state, dtype) if dtype is not None else published_dtypes(component)
    kept = model_class._keep_in_fp32_modules or ()
    converted = {}
    for name, tensor in state.items():
        is_kept = dtype is not None and any(module in name.split(".") for module in kept)
        converted[name] = tensor.to(torch.float32 if is_kept else dtypes.get(name) or tensor.dtype)
    model.load_state_dict(converted, assign=True)
    model.save_pretrained(out, max_shard_size=MAX_FILE_SIZE)
    _clean_config(out / "config.json")


def published_dtypes(component: Component) -> dict[str, torch.dtype | None]:
    """Return the dtype of each published weight of a component; empty if the folder has no weights."""
    if not any(component.folder.glob("*.safetensors")):
        return {}
    with open_weights(component.weight_files()) as weights:
        return {name: DTYPES.get(str(weight.get_dtype())) for name, weight in weights.items()}


def _clean_config(file: Path) -> None:
    """Remove the path of the folder that a model was built from, which diffusers adds to its config."""
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields.pop("_name_or_path", None)
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_component(source: Path, out: Path) -> None:
    """Copy the files of a component. Links are replaced by the files that they name."""
    for file in sorted(path for path in source.rglob("*") if path.is_file() and path.suffix in COPIED):
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
