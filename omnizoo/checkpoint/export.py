"""A checkpoint as a Hugging Face folder: safetensors in the family's published key layout, config, tokenizer."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from omnizoo.checkpoint import folder, manifest, tensors
from omnizoo.checkpoint.start import checkpoints_in, is_checkpoint
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.model_section import Model
from omnizoo.modalities.frozen import Frozen
from omnizoo.modalities.processor_files import PROCESSOR_FILES
from omnizoo.modalities.spoken import VOICES, write_pickled_voices
from omnizoo.models.adapter import Attached, merge
from omnizoo.models.adapter_files import write_folder
from omnizoo.models.artefact import read_json
from omnizoo.models.build import load_tokenizer, read_generation_config, read_model_config
from omnizoo.models.hf_private import auto_class, kept_in_fp32, tied_sources
from omnizoo.models.published_files import set_dtype

MOST_IN_A_FILE = "5GB"  # of weights, as published models are split
# Gives the model and the weights that the adapter of a checkpoint was trained on; assembly/adapters.py has it.
Base = Callable[[Path, Model], tuple[PreTrainedModel, dict[str, torch.Tensor]]]


def export(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    ema: bool = False,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
    best: bool = False,
    base: Base | None = None,
) -> "Exported":
    """Write `checkpoint` (a step folder, or a folder of them: the newest or `best`) to `out`.

    `from_pretrained` and inference engines load the result. Of a module of the user's own, it is the weights and the
    tokenizer; `huggingface_hub.load_torch_model(module, out)` loads them. `dtype` None is the precision that the
    weights were published in, or of drawn ones that of the master weights. `ema` takes the moving average of the
    weights that were trained.
    Code that the checkpoint names is imported only if it is allowed here: nothing in the checkpoint can allow it.
    Of a run with an adapter it is a folder of PEFT's; with `base`, which gives the weights it was trained on, it is the
    whole model with the adapter merged in.
    """
    source = best_checkpoint(checkpoint) if best else resolve_checkpoint(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; give a new folder")
    folder_of_model = source / "model"
    is_own = not (folder_of_model / "config.json").is_file()  # a module of the user's own
    spec = Model(
        config=str(folder_of_model),
        tokenizer=str(folder_of_model) if is_own else None,
        allow_code=list(allow_code),
        trust_remote_code=trust_remote_code,
    )
    record = _adapter_of(source)
    if base is not None and record is None:
        raise UserError(f"--merge: {source} has no adapter; leave --merge out")
    model = None if is_own or record else _build(spec, source)
    saved = tensors.on_meta(source / "tensors")
    wanted = saved if model is None else tensors.model_tensors(model)
    weights = {
        name: torch.empty(tensor.shape, dtype=saved.get(name, tensor).dtype)
        for name, tensor in wanted.items()
        if name.startswith(tensors.MODEL)
    }
    tensors.read(weights, source / "tensors")
    if ema:
        averaged = {name: tensors.AVERAGE + name.removeprefix(tensors.MODEL) for name in weights}
        averaged = {name: average for name, average in averaged.items() if average in saved}
        if not averaged:
            raise UserError(f"--ema: {source} holds no average of the weights; train with optimizer.ema")
        tensors.read({average: weights[name] for name, average in averaged.items()}, source / "tensors")
    state = {name.removeprefix(tensors.MODEL): tensor for name, tensor in weights.items()}
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if record is not None and (lacking := sorted(record.found.trained - set(state))):
        raise UserError(f"{source}: its adapter has {lacking[0]}, which is not among the weights")
    if base is not None and record is not None:
        model, whole = base(source, spec)
        merge(model, whole, record.found, state)
        state = whole
    if model is not None:
        dtype = dtype or _published_dtype(folder_of_model)
    state = cast(state, dtype, _kept(model))
    parameters: Counter[str] = Counter()
    for tensor in state.values():  # which saving takes apart
        parameters[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    if record is not None and model is None:
        partial.mkdir(parents=True)
        write_folder(partial, record.found, state, record.path, record.base)
    elif model is None:
        partial.mkdir(parents=True)
        save_torch_state_dict(state, partial, max_shard_size=MOST_IN_A_FILE)
    else:
        set_dtype(model.config, dtype or next(t.dtype for t in state.values() if t.is_floating_point()))
        if (folder_of_model / "generation_config.json").is_file():
            model.generation_config = read_generation_config(folder_of_model)
        tied = tied_sources(model)
        state = {tied.get(name, name): tensor for name, tensor in state.items()}
        model.save_pretrained(partial, state_dict=state, max_shard_size=MOST_IN_A_FILE)
        for name in PROCESSOR_FILES:
            if (folder_of_model / name).is_file():
                shutil.copyfile(folder_of_model / name, partial / name)
        if (folder_of_model / VOICES).is_file():
            shutil.copyfile(folder_of_model / VOICES, partial / VOICES)
            write_pickled_voices(folder_of_model / VOICES, partial)
    load_tokenizer(spec).save_pretrained(partial)
    if out.exists():
        out.rmdir()
    os.rename(partial, out)
    kinds = "an adapter, for PEFT" if record is not None else "a module of your own"
    return Exported(source, out, kinds if model is None else type(model).__name__, parameters)


def cast(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """`state` in `dtype`, but for whole numbers and what is `kept` in its own precision."""
    return {
        name: tensor if dtype is None or name in kept or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in state.items()
    }


def _kept(model: PreTrainedModel | None) -> set[str]:
    """What the authors of a model compute with in fp32 whatever the rest is in, and frozen tokenisers."""
    if model is None:
        return set()
    frozen = [f"{name}." for name, module in model.named_modules() if isinstance(module, Frozen)]
    return {*kept_in_fp32(model), *(name for name in model.state_dict() if name.startswith(tuple(frozen)))}


def _published_dtype(folder_of_model: Path) -> torch.dtype | None:
    """As the config.json of a checkpoint has it."""
    fields = read_json(folder_of_model / "config.json")
    found = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


@dataclass(frozen=True)
class Exported:
    """What was written, from where."""

    checkpoint: Path
    out: Path
    kind: str  # the class of the model, or what else it is
    parameters: Mapping[str, int]  # by their precision

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        shown = ", ".join(sorted(self.parameters, key=lambda dtype: -self.parameters[dtype]))
        yield f"wrote {self.out}: {self.kind}, {sum(self.parameters.values()) / 1e6:.1f} M parameters in {shown}"
        yield f"  from {self.checkpoint}"
        for file in sorted(path for path in self.out.rglob("*") if path.is_file()):
            yield f"  {file.relative_to(self.out)} ({_size(file.stat().st_size)})"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


@dataclass(frozen=True)
class Record:
    """What a checkpoint tells of its adapter, and of the base that it does not hold."""

    found: Attached
    path: str | None
    base: str  # hash


def has_adapter(checkpoint: Path) -> bool:
    """Of a checkpoint, or the newest one of a run."""
    return _adapter_of(resolve_checkpoint(checkpoint)) is not None


def _adapter_of(source: Path) -> Record | None:
    try:
        fields = manifest.read_state(source, manifest.read(source)).get("adapter")
        return None if fields is None else Record(Attached.of(fields), fields["path"], str(fields["base"]))
    except (manifest.Damage, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{source}: state.json does not tell of an adapter as it should: {named_line(error)}"
        ) from error


def _build(spec: Model, source: Path) -> PreTrainedModel:
    """The model of a checkpoint, on meta."""
    config = read_model_config(spec)
    builder = auto_class(config, spec.trust_remote_code)
    if builder is None:
        raise UserError(f"{source}: transformers has no model of type `{config.model_type}` that writes text")
    with torch.device("meta"):
        model = builder.from_config(config, trust_remote_code=spec.trust_remote_code)
    assert isinstance(model, PreTrainedModel)
    return model


def resolve_checkpoint(checkpoint: Path) -> Path:
    """The step folder that `checkpoint` is, or the newest intact one of a run."""
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a folder; give a checkpoint (step_...) or a run folder")
    if is_checkpoint(checkpoint):
        if (reason := folder.damage(checkpoint)) is not None:
            raise UserError(f"{checkpoint} is not a complete checkpoint: {reason}")
        return checkpoint
    newest, passed = folder.newest_intact(checkpoints_in(checkpoint))
    if newest is None:
        reasons = "".join(f"; {path.name}: {reason}" for path, reason in passed.items())
        raise UserError(f"{checkpoint} holds no complete checkpoint (step_...){reasons}")
    return newest


def best_checkpoint(run: Path) -> Path:
    """The checkpoint that `best.json` names, if it is of the same run and intact."""
    if not run.is_dir() or is_checkpoint(run):
        raise UserError(f"--best: {run} is not the folder of a run; give that, or leave --best out")
    directory = checkpoints_in(run)
    found = folder.read_best(directory)
    if found is None:
        raise UserError(f"--best: {directory} has no {folder.BEST}, which runs with checkpoint.best: eval/loss write")
    source = folder.folder_of(directory, found.step)
    if folder.owner(source) != found.run:
        raise UserError(f"--best: {directory / folder.BEST} names {source.name} of run {found.run}, which is not there")
    return resolve_checkpoint(source)
