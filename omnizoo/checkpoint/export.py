"""A checkpoint as a Hugging Face folder: safetensors in the family's published key layout, config, tokenizer."""

import os
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from omnizoo.checkpoint import folder, tensors
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.models.build import load_tokenizer, read_model_config
from omnizoo.models.hf_private import auto_class


def export(checkpoint: Path, out: Path, dtype: torch.dtype | None = None, ema: bool = False) -> Path:
    """Write `checkpoint` (a step folder, or a folder of them: the newest) to `out`; returns the step folder used.

    `from_pretrained` and inference engines load the result. `dtype` None keeps the precision of the master weights.
    `ema` takes the moving average of the weights that were trained.
    """
    source = _resolve(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; give a new folder")
    run = load_config(source / "config.yaml", [])
    if run.model.module is not None:
        raise UserError(f"{source} holds {run.model.module}: export writes Hugging Face models only")
    origin = {"path": None, "foundation": None, "config": str(source / "model"), "tokenizer": None}
    spec = run.model.model_copy(update=origin)
    config = read_model_config(spec)
    with torch.device("meta"):
        builder = auto_class(config, spec.trust_remote_code)
        model = builder.from_config(config, trust_remote_code=spec.trust_remote_code)
    saved = tensors.dtypes(source / "tensors")
    weights = {
        name: torch.empty(tensor.shape, dtype=saved.get(name, tensor.dtype))
        for name, tensor in tensors.model_tensors(model).items()
    }
    tensors.read(weights, source / "tensors")
    if ema:
        averaged = {name: tensors.AVERAGE + name.removeprefix(tensors.MODEL) for name in weights}
        averaged = {name: average for name, average in averaged.items() if average in saved}
        if not averaged:
            raise UserError(f"--ema: {source} holds no average of the weights; train with optimizer.ema")
        tensors.read({average: weights[name] for name, average in averaged.items()}, source / "tensors")
    state = {name.removeprefix(tensors.MODEL): tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
    model.config.dtype = next(iter(state.values())).dtype
    if (source / "model" / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source / "model")

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=state)
    load_tokenizer(spec).save_pretrained(partial)
    if out.exists():
        out.rmdir()
    os.rename(partial, out)
    return source


def _resolve(checkpoint: Path) -> Path:
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a folder; give a checkpoint (step_...) or a run folder")
    if checkpoint.name.startswith("step_"):
        if (reason := folder.incompleteness(checkpoint)) is not None:
            raise UserError(f"{checkpoint} is not a complete checkpoint: {reason}")
        return checkpoint
    newest = folder.newest_complete(checkpoint / "checkpoints") or folder.newest_complete(checkpoint)
    if newest is None:
        raise UserError(f"{checkpoint} holds no complete checkpoint (step_...)")
    return newest
