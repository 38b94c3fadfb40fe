"""Export a checkpoint as a Hugging Face folder: the config, the tokenizer, and safetensors with the published names."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel

from omnizoo.checkpoint import manifest, tensor_files
from omnizoo.checkpoint.model_card import write_card
from omnizoo.checkpoint.resume import best_checkpoint, resolve_checkpoint
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.sections.model import ModelSection
from omnizoo.config.versions import install_command
from omnizoo.modalities.decoders.precomputed_speech import VOICES, write_pickled_voices
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.modalities.processor_files import PROCESSOR_FILES, processor_files
from omnizoo.modalities.processor_needs import TORCHVISION, processor_packages
from omnizoo.models.adapters.lora import AdapterInfo, merge
from omnizoo.models.adapters.peft_files import write_folder
from omnizoo.models.export_files import set_dtype, write_dtype
from omnizoo.models.hf_private import auto_class, kept_in_fp32, tied_sources
from omnizoo.models.interfaces.score_head import set_padding
from omnizoo.models.read_config import load_tokenizer, read_generation_config, read_model_config
from omnizoo.models.untrusted_folders import read_json

MAX_FILE_SIZE = "5GB"  # maximum size of a weight file, as in published models
# Returns the base model of a checkpoint's adapter, and the weights of the base model (see merge_adapter.py).
Base = Callable[[Path, ModelSection], tuple[PreTrainedModel, dict[str, torch.Tensor]]]


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
    """Write a checkpoint to `out`, as a folder that `from_pretrained` and inference engines load.

    For a user-defined module, the folder contains the weights and the tokenizer; load it with
    `huggingface_hub.load_torch_model(module, out)`. For a run with an adapter, `out` is a PEFT folder.

    Args:
        checkpoint: A checkpoint, or a run folder whose newest checkpoint is exported.
        out: A new or empty folder.
        dtype: Precision of the weights. None keeps the precision of the model that training started from, or that of
            the master weights if they were initialized randomly.
        ema: Export the moving average of the trained weights.
        allow_code: Python modules that may be imported if the checkpoint names them. The checkpoint itself cannot allow
            modules.
        trust_remote_code: Run Python code inside the checkpoint's model folder.
        best: Export the best checkpoint of the run folder instead of the newest.
        base: Function that returns the base model of the adapter and its weights. The adapter is merged into them.

    Returns:
        A description of the exported folder.

    Raises:
        UserError: If the checkpoint is damaged, if it does not contain what was requested (such as a moving average),
            or if `out` is not empty.
    """
    source = best_checkpoint(checkpoint) if best else resolve_checkpoint(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: the folder is not empty. Choose a new or empty folder.")
    model_folder = source / "model"
    is_user_module = not (model_folder / "config.json").is_file()
    spec = ModelSection(
        config=str(model_folder),
        tokenizer=str(model_folder) if is_user_module else None,
        allow_code=list(allow_code),
        trust_remote_code=trust_remote_code,
    )
    adapter = adapter_of(source)
    if base is not None and adapter is None:
        raise UserError(f"--merge: {source} has no adapter. Remove the option.")

    model = None if is_user_module or adapter else _build(spec, source)
    state = read_weights(source, model, ema)
    if adapter is not None:
        missing = sorted(adapter.info.trained - set(state))
        if missing:
            raise UserError(
                f"{source}: the weights of its adapter lack {missing[0]}. Export another checkpoint of the run."
            )
        if base is not None:
            model, base_state = base(source, spec)
            merge(model, base_state, adapter.info, state)
            state = base_state
    if model is not None:
        dtype = dtype or _published_dtype(model_folder)
    state = cast(state, dtype, _fixed_precision(model))
    parameters: Counter[str] = Counter()
    for tensor in state.values():  # counted before saving, because saving removes entries
        parameters[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()

    tokenizer = load_tokenizer(spec)
    if model is not None:
        set_padding(model.config, tokenizer)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if model is not None:
        kind = type(model).__name__
        _write_model(partial, model, state, dtype, model_folder)
    else:
        kind = "PEFT adapter" if adapter else "user module"
        _write_weights(partial, state, adapter)
    tokenizer.save_pretrained(partial)
    write_card(partial, source, library="transformers" if model is not None else "peft" if adapter else "omnizoo")
    if out.exists():
        out.rmdir()
    os.rename(partial, out)
    needs = processor_packages(model.config.model_type) if model is not None and processor_files(out) else []
    return Exported(checkpoint=source, out=out, kind=kind, parameters=parameters, processor_needs=needs)


def read_weights(source: Path, model: PreTrainedModel | None, ema: bool) -> dict[str, torch.Tensor]:
    """Return the weights of `model`, by their names in the model.

    If `model` is None, return all weights of the checkpoint.
    """
    saved = tensor_files.on_meta(source / "tensors")
    needed = saved if model is None else tensor_files.model_tensors(model)
    weights = {}
    for name, tensor in needed.items():
        if name.startswith(tensor_files.MODEL):
            weights[name] = torch.empty(tensor.shape, dtype=saved.get(name, tensor).dtype)
    tensor_files.read(weights, source / "tensors")

    if ema:
        averages = {}
        for name, tensor in weights.items():
            average_name = tensor_files.AVERAGE + name.removeprefix(tensor_files.MODEL)
            if average_name in saved:
                averages[average_name] = tensor
        if not averages:
            raise UserError(
                f"--ema: {source} has no moving average of the weights. Train with optimizer.ema, or remove the option."
            )
        tensor_files.read(averages, source / "tensors")
    return {name.removeprefix(tensor_files.MODEL): tensor for name, tensor in weights.items()}


def _write_weights(folder: Path, state: dict[str, torch.Tensor], adapter: "SavedAdapter | None") -> None:
    """Write a PEFT folder, or the weights of a user-defined module."""
    folder.mkdir(parents=True)
    if adapter is not None:
        write_folder(folder, adapter.info, state, adapter.path, adapter.base)
    else:
        save_torch_state_dict(state, folder, max_shard_size=MAX_FILE_SIZE)


def _write_model(
    folder: Path,
    model: PreTrainedModel,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
    model_folder: Path,
) -> None:
    """Write the config and the weights, and copy the processor files from `model_folder`."""
    dtype = dtype or next(t.dtype for t in state.values() if t.is_floating_point())
    set_dtype(model.config, dtype)
    if (model_folder / "generation_config.json").is_file():
        model.generation_config = read_generation_config(model_folder)
    tied = tied_sources(model)
    state = {tied.get(name, name): tensor for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_FILE_SIZE)
    # `save_pretrained` writes the dtype of the parameters of `model`, which are on the meta device.
    write_dtype(folder / "config.json", dtype, type(model).__name__)
    for name in (*PROCESSOR_FILES, VOICES):
        if (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, folder / name)
    if (model_folder / VOICES).is_file():
        write_pickled_voices(model_folder / VOICES, folder)


def cast(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """Convert `state` to `dtype`, except integer tensors and the tensors named in `kept`."""
    result = {}
    for name, tensor in state.items():
        is_cast = dtype is not None and name not in kept and tensor.is_floating_point()
        result[name] = tensor.to(dtype) if is_cast else tensor
    return result


def _fixed_precision(model: PreTrainedModel | None) -> set[str]:
    """Return the names of tensors that are in frozen tokenizers, or that transformers keeps in fp32."""
    if model is None:
        return set()
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Frozen))
    frozen = {name for name in model.state_dict() if name.startswith(prefixes)}
    return {*kept_in_fp32(model), *frozen}


def _published_dtype(folder_of_model: Path) -> torch.dtype | None:
    """Return the dtype that config.json in a model folder states; None if it states none."""
    fields = read_json(folder_of_model / "config.json")
    dtype_name = str(fields.get("dtype") or fields.get("torch_dtype"))
    dtype = getattr(torch, dtype_name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    checkpoint: Path
    out: Path
    kind: str  # class of the model, or a description of an adapter or user module
    parameters: Mapping[str, int]  # number of parameters by dtype
    processor_needs: Sequence[str] = ()  # packages that transformers' processor of the model needs

    def lines(self) -> Iterator[str]:
        """Yield the lines to print on the terminal."""
        dtypes = ", ".join(sorted(self.parameters, key=lambda dtype: -self.parameters[dtype]))
        millions = sum(self.parameters.values()) / 1e6
        yield f"wrote {self.out}: {self.kind}, {millions:.1f} M parameters in {dtypes}"
        yield f"  from {self.checkpoint}"
        if self.processor_needs:
            packages = ", ".join(self.processor_needs)
            is_extra = set(self.processor_needs) == {TORCHVISION}
            command = install_command("processors") if is_extra else f"pip install {' '.join(self.processor_needs)}"
            yield f"  its processor in transformers needs {packages}: {command}"
        for file in sorted(path for path in self.out.rglob("*") if path.is_file()):
            yield f"  {file.relative_to(self.out)} ({_size(file.stat().st_size)})"


def _size(num_bytes: int) -> str:
    """Format a number of bytes for display."""
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB"


@dataclass(frozen=True)
class SavedAdapter:
    """The adapter of a checkpoint, and a reference to its base model. Checkpoints do not contain the base model."""

    info: AdapterInfo
    path: str | None  # folder of the base model
    base: str  # hash of the base model


def has_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint, or the newest checkpoint of a run folder, has an adapter."""
    return adapter_of(resolve_checkpoint(checkpoint)) is not None


def adapter_of(source: Path) -> SavedAdapter | None:
    """Return the adapter that the state of a checkpoint describes; None if it has none."""
    try:
        fields = manifest.read_state(source, manifest.read(source)).get("adapter")
        if fields is None:
            return None
        return SavedAdapter(AdapterInfo.of(fields), fields["path"], str(fields["base"]))
    except (manifest.Damage, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{source}/state.json: the description of the adapter is invalid: {named_line(error)}. Export another "
            "checkpoint of the run."
        ) from error


def _build(spec: ModelSection, source: Path) -> PreTrainedModel:
    """Build the model of a checkpoint on the meta device."""
    config = read_model_config(spec)
    builder = auto_class(config, spec.trust_remote_code)
    if builder is None:
        raise UserError(
            f"{source}: transformers has no text generation model of type `{config.model_type}`. Install the version "
            "of transformers that the run was trained with."
        )
    with torch.device("meta"):
        model = builder.from_config(config, trust_remote_code=spec.trust_remote_code)
    assert isinstance(model, PreTrainedModel)
    return model
