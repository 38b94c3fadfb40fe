"""Find the pipeline that a command-line argument names: a pipeline folder, a LoRA file, or the run of a transformer."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.checkpoint.export_denoiser import DenoiserRun, denoiser_run, trained_weights
from omnizoo.checkpoint.resume import checkpoints_in, is_checkpoint
from omnizoo.config.errors import UserError
from omnizoo.generation.diffusion.pipeline import load_pipeline
from omnizoo.hub.resolve import fetch_model
from omnizoo.models.diffusion.conditioning.components import load_component
from omnizoo.models.diffusion.lora_file import WEIGHTS as LORA
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder, is_pipeline_folder
from omnizoo.models.diffusion.write_pipeline import write_denoiser


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline folder, and what replaces or changes its transformers."""

    folder: PipelineFolder
    run: DenoiserRun | None = None
    lora: Path | None = None  # folder of a LoRA file

    def load(self, device: torch.device) -> Any:
        """Load the pipeline on a device."""
        pipeline = load_pipeline(self.folder, {} if self.run is None else _trained(self.run), device)
        if self.lora is not None:
            pipeline.load_lora_weights(self.lora)
        return pipeline


def find_pipeline(model: Path, base: str | None, note: Callable[[str], None]) -> PipelineSource | None:
    """Return the pipeline that `model` names; None if it is another model.

    Args:
        model: Pipeline folder, ORG/NAME on the hub, folder of a LoRA file, run folder or checkpoint.
        base: Pipeline folder of a LoRA file.
        note: Called with a message about the run or the adapter.

    Raises:
        UserError: If a folder cannot be used.
    """
    folder = fetch_model(str(model), "MODEL") or model
    if (folder / LORA).is_file():
        if base is None:
            raise UserError(f"--base: not set, but {folder} is a LoRA file of diffusers. Pass its pipeline folder.")
        note(f"{folder / LORA} adapts {base}")
        return PipelineSource(PipelineFolder.read(fetch_model(base, "--base") or base, "--base"), lora=folder)
    if is_pipeline_folder(folder):
        if base is not None:
            raise UserError(f"--base: {folder} is not an adapter folder. Remove --base.")
        return PipelineSource(PipelineFolder.read(folder, "MODEL"))
    if folder.is_dir() and (is_checkpoint(folder) or any(checkpoints_in(folder).glob("step_*"))):
        run = denoiser_run(folder)
        if run is not None:
            note(f"transformer of {run.checkpoint}, other components of {run.pipeline.path}")
            return PipelineSource(run.pipeline, run=run)
    return None


def _trained(run: DenoiserRun) -> dict[str, nn.Module]:
    """Return the trained transformers of a run, by component.

    They are written to a temporary folder and read by diffusers, which also creates what is not in the weights.
    """
    models = {}
    with tempfile.TemporaryDirectory(prefix="omnizoo-") as temporary:
        for name, state in trained_weights(run).items():
            component = run.pipeline.component(name)
            write_denoiser(Path(temporary) / name, component, state, dtype=None)
            models[name] = load_component(replace(component, folder=Path(temporary) / name), torch.device("cpu"))
    return models
