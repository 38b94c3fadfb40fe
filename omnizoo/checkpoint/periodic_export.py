"""Write the weights of a run as Hugging Face folders while it trains (`checkpoint.export`).

Rank 0 receives the full tensors one group at a time, so it needs host memory for one weight file only. The folder gets
its final name when all its files are on disk, so an interrupted export leaves no incomplete folder.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from omnizoo.checkpoint.folder import discard, flush, folder_of, partial_of
from omnizoo.checkpoint.model_card import write_card
from omnizoo.checkpoint.save import on_all_ranks, write_model_files
from omnizoo.checkpoint.weight_stream import stream_trained, stream_weights
from omnizoo.config.schema import Config
from omnizoo.config.sections.checkpoint import ExportSettings
from omnizoo.config.yaml_file import save_config
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.models.adapters.lora import attached
from omnizoo.models.adapters.peft_files import write_folder
from omnizoo.models.export_files import carried, write_dtype
from omnizoo.models.hf_private import PublishedKeys, kept_in_fp32
from omnizoo.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_FILE_BYTES = 5 * 10**9  # maximum size of a weight file, as in published models
Named = Iterator[tuple[str, torch.Tensor]]


def export_step(
    directory: Path,
    step: int,
    model: nn.Module,
    keys: PublishedKeys,
    adapter: dict[str, Any] | None,
    mesh: Mesh,
    config: Config,
    tokenizer: Any,
) -> Path:
    """Write the weights after a step to `directory`, as a folder for `from_pretrained`. Collective: all ranks call it.

    For a run with an adapter, it is a PEFT folder. Afterwards, exports beyond `checkpoint.export.keep` are removed.

    Args:
        directory: Folder of the exports of the run.
        step: Number of completed steps. It is part of the folder's name.
        model: The sharded model.
        keys: Published names of the weights, from before the model was sharded.
        adapter: The adapter record of the run; None without an adapter.
        mesh: The device mesh.
        config: The config of the run.
        tokenizer: The tokenizer of the run.

    Returns:
        The folder.

    Raises:
        SaveError: If writing failed. The error is raised on all ranks.
    """
    settings = config.checkpoint.export
    assert settings is not None
    partial = partial_of(directory, step)
    final = folder_of(directory, step)
    dtype = DTYPES[settings.dtype] if settings.dtype else carried(model).dtype

    def prepare() -> None:
        if mesh.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(".step_*.partial"):
                shutil.rmtree(leftover)
            partial.mkdir()

    def write() -> None:
        if adapter is not None:
            _write_adapter(model, adapter, dtype, partial, mesh)
            return
        weights = stream_weights(model, keys, dtype, mesh.is_first, fixed=_fixed_precision(model))
        _write_weights(weights, partial)

    def finish() -> None:
        if not mesh.is_first:
            return
        _write_other_files(model, adapter, dtype, partial, config, tokenizer)
        for path in [*partial.rglob("*"), partial]:
            flush(path)
        if final.exists():  # the run resumed from an earlier step
            discard(final)
        os.rename(partial, final)
        flush(directory)
        _prune(directory, settings)

    on_all_ranks(mesh, prepare, partial)
    on_all_ranks(mesh, write, partial)
    on_all_ranks(mesh, finish, partial)
    return final


def _fixed_precision(model: nn.Module) -> set[str]:
    """Return the names of tensors that are in frozen tokenizers, or that transformers keeps in fp32."""
    names = set(kept_in_fp32(model))
    for prefix, module in model.named_modules():
        if isinstance(module, Frozen):
            names |= {f"{prefix}.{name}" for name in module.state_dict()}
    return names


def _write_adapter(model: nn.Module, adapter: dict[str, Any], dtype: torch.dtype | None, out: Path, mesh: Mesh) -> None:
    """Write a PEFT adapter. Collective: all ranks must call it."""
    info = attached(model)
    assert info is not None
    state = {}
    for name, tensor in stream_trained(model, info, mesh.is_first):
        state[name] = tensor.to("cpu", dtype or tensor.dtype)
    if mesh.is_first:
        write_folder(out, info, state, adapter["path"], adapter["base"])


def _write_weights(weights: Named, out: Path) -> None:
    """Write tensors to safetensors files of at most `MAX_FILE_BYTES`, with an index if there are several files.

    All tensors are read even if writing fails, because other ranks take part in gathering them.
    """
    files: list[dict[str, torch.Tensor]] = []  # tensors on the meta device, by file
    buffer: dict[str, torch.Tensor] = {}
    num_bytes = 0
    failure: Exception | None = None

    def write() -> None:
        save_file(buffer, out / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append({name: tensor.to("meta") for name, tensor in buffer.items()})
        buffer.clear()

    for name, tensor in weights:
        if failure is not None:
            continue
        try:
            if buffer and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
                write()
                num_bytes = 0
            buffer[name] = tensor.to("cpu", copy=True)
            num_bytes += tensor.nbytes
        except Exception as error:  # noqa: BLE001 (raised below, after all tensors have been gathered)
            failure = error
    if failure is not None:
        raise failure
    if not buffer:
        return  # another rank writes
    write()
    _name_files(files, out)


def _name_files(files: list[dict[str, torch.Tensor]], out: Path) -> None:
    """Give the weight files their published names, and write the index if there are several."""
    if len(files) == 1:
        os.rename(out / "0.safetensors", out / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        os.rename(out / f"{i}.safetensors", out / name)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_other_files(
    model: nn.Module,
    adapter: dict[str, Any] | None,
    dtype: torch.dtype | None,
    out: Path,
    config: Config,
    tokenizer: Any,
) -> None:
    """Write the config, the tokenizer and the processor of the model, and the model card."""
    library = "omnizoo"
    if adapter is not None:
        library = "peft"
        tokenizer.save_pretrained(out)
    else:
        write_model_files(model, tokenizer, config, out)
    if adapter is None and isinstance(model, PreTrainedModel):
        library = "transformers"
        dtype = dtype or next(parameter.dtype for parameter in model.parameters())
        write_dtype(out / "config.json", dtype, type(model).__name__.removeprefix("FSDP"))
    save_config(config, out / "config.yaml")  # the model card lists the models and datasets that it names
    write_card(out, out, library=library)
    (out / "config.yaml").unlink()


def _prune(directory: Path, settings: ExportSettings) -> None:
    """Remove all exports except the newest `settings.keep`."""
    if settings.keep is None:
        return
    exports = [path for path in directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
    exports.sort(key=lambda path: int(path.name.removeprefix("step_")))
    for folder in exports[: -settings.keep]:
        discard(folder)
