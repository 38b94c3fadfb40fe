"""Export the run of a diffusion transformer: a pipeline folder, or the LoRA file of its adapter."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from omnizoo.checkpoint.export import Exported, SavedAdapter, adapter_of, read_weights
from omnizoo.checkpoint.model_card import write_card
from omnizoo.checkpoint.resume import best_checkpoint, resolve_checkpoint
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.hub.resolve import resolve_names
from omnizoo.models.adapters.base_identity import base_identity, check_base_identity
from omnizoo.models.adapters.lora import AdapterInfo, merge
from omnizoo.models.diffusion.denoiser import CLASS, read_denoiser
from omnizoo.models.diffusion.lora_file import write_lora_file
from omnizoo.models.diffusion.pipeline_folder import PipelineFolder
from omnizoo.models.diffusion.samples import pipeline_of
from omnizoo.models.diffusion.write_pipeline import write_pipeline
from omnizoo.models.untrusted_folders import open_weights, read_json

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DenoiserRun:
    """A checkpoint of a diffusion transformer, and the pipeline that the run used."""

    checkpoint: Path
    config: Config
    pipeline: PipelineFolder

    @property
    def components(self) -> list[str]:
        """Names of the trained components of the pipeline."""
        return list(read_denoiser(self.config.model).configs)


def denoiser_run(folder: Path, best: bool = False) -> DenoiserRun | None:
    """Return the checkpoint of a run of a diffusion transformer; None for other models.

    Args:
        folder: A checkpoint, or a run folder whose newest checkpoint is used.
        best: Whether to use the best checkpoint of a run folder.

    Raises:
        UserError: If there is no checkpoint, or the pipeline of the run is gone.
    """
    source = best_checkpoint(folder) if best else resolve_checkpoint(folder)
    file = source / "config.yaml"
    if not (source / "model" / "config.json").is_file() or CLASS not in read_json(source / "model" / "config.json"):
        return None
    config, _ = resolve_names(load_config(file, []), with_data=False)
    return DenoiserRun(source, config, pipeline_of(config.model))


def export_denoiser(
    run: DenoiserRun, out: Path, dtype: torch.dtype | None = None, ema: bool = False, merge_adapter: bool = False
) -> Exported:
    """Write the weights of a run as a folder that plain diffusers reads.

    Args:
        run: The checkpoint.
        out: New or empty folder.
        dtype: Precision of the weights. None keeps that of the published weights, or of the run.
        ema: Whether to export the moving average of the weights.
        merge_adapter: Whether to merge the adapter into the transformer and export the pipeline.

    Raises:
        UserError: If the checkpoint does not contain what was requested, or `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: the folder is not empty. Choose a new or empty folder.")
    adapter = adapter_of(run.checkpoint)
    if merge_adapter and adapter is None:
        raise UserError(f"--merge: {run.checkpoint} has no adapter. Remove the option.")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if adapter is None or merge_adapter:
        states = trained_weights(run, ema)
        write_pipeline(partial, run.pipeline, states, dtype)
        tensors = [tensor for state in states.values() for tensor in state.values()]
        kind = run.pipeline.class_name
    else:
        tensors = _write_adapter(partial, run, adapter, dtype, ema)
        kind = "LoRA file"
    parameters: Counter[str] = Counter()
    for tensor in tensors:
        parameters[str(dtype or tensor.dtype).removeprefix("torch.")] += tensor.numel()
    write_card(partial, run.checkpoint, library="diffusers")
    if out.exists():
        out.rmdir()
    os.rename(partial, out)
    return Exported(checkpoint=run.checkpoint, out=out, kind=kind, parameters=parameters)


def trained_weights(run: DenoiserRun, ema: bool = False) -> dict[str, Weights]:
    """Return the weights of the trained transformers by component, with the adapter merged if the run has one."""
    state = read_weights(run.checkpoint, None, ema)
    adapter = adapter_of(run.checkpoint)
    if adapter is not None:
        state = _merged(run, adapter, state)
    return _by_component(run.components, state)


def _merged(run: DenoiserRun, adapter: SavedAdapter, state: Weights) -> Weights:
    """Return the published weights with the adapter merged into them, in fp32."""
    model = run.config.model
    check_base_identity(adapter.base, base_identity(model, run.config.train.seed), f"--merge: {run.checkpoint}")
    folders = read_denoiser(model).folders
    if not folders:
        raise UserError(f"--merge: the base model of {run.checkpoint} has random weights. Use model.path for the base.")
    base: Weights = {}
    for name in run.components:
        prefix = _prefix(run.components, name)
        with open_weights(run.pipeline.component(name).weight_files()) as weights:
            base |= {prefix + key: weight[...].float() for key, weight in weights.items()}
    merge(nn.Module(), base, adapter.info, state)
    return base


def _write_adapter(
    out: Path, run: DenoiserRun, adapter: SavedAdapter, dtype: torch.dtype | None, ema: bool
) -> list[torch.Tensor]:
    """Write the LoRA file of each trained transformer, and return the tensors. A pair has one folder for each."""
    state = read_weights(run.checkpoint, None, ema)
    trained = {name: state[name].to(dtype or state[name].dtype) for name in adapter.info.trained}
    for name, tensors in _by_component(run.components, trained).items():
        folder = out / name if len(run.components) > 1 else out
        folder.mkdir(parents=True)
        info = _info_of(adapter.info, _prefix(run.components, name))
        write_lora_file(folder, info, tensors, adapter.base)
    return list(trained.values())


def _info_of(info: AdapterInfo, prefix: str) -> AdapterInfo:
    """Return the part of an adapter that belongs to one transformer of a pair, without the prefix of its names."""
    fields = {}
    for field in ("modules", "saved", "trained", "started"):
        names = [name.removeprefix(prefix) for name in getattr(info, field) if name.startswith(prefix)]
        fields[field] = type(getattr(info, field))(names)
    return replace(info, **fields)


def _by_component(components: list[str], state: Mapping[str, torch.Tensor]) -> dict[str, Weights]:
    """Split weights by transformer, without the prefixes of a pair."""
    parts = {}
    for name in components:
        prefix = _prefix(components, name)
        parts[name] = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return parts


def _prefix(components: list[str], name: str) -> str:
    """Return the prefix of the weights of a transformer. Only a pair has prefixes."""
    return f"{name}." if len(components) > 1 else ""
