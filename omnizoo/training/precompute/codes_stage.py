"""Stage for models whose decoders have frozen tokenizers: targets of items, such as codes of a codebook."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from omnizoo.config.errors import UserError, first_line
from omnizoo.config.hub import local_path
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Decoder, Modality
from omnizoo.modalities.frozen_tokenizer import Frozen
from omnizoo.modalities.item import Inputs, MediaItem, NestedRun, Port
from omnizoo.modalities.precomputed import TARGETS
from omnizoo.models.weights.sampled_hash import add_sampled
from omnizoo.training.precompute.stages import LoadedStage, RowItems, Stage


class CodesStage(Stage):
    """Computes the targets of decoders whose frozen tokenizer has published weights.

    Args:
        modalities: The modalities of the model, with modules on the meta device.
        model: The section `model` of the config.
    """

    name = "codes"

    def __init__(self, modalities: Mapping[str, Modality], model: ModelSection) -> None:
        self.decoders: dict[Port, tuple[Decoder, SubmoduleSettings]] = {}
        for name, settings in model.modalities.items():
            decoder = modalities[name].decoder
            if decoder is None or settings.decoder is None or settings.decoder.path is None:
                continue
            if decoder_has_codes(decoder):
                self.decoders[Port(name, "decoder")] = (decoder, settings.decoder)
        if not self.decoders:
            raise UserError(
                "model.modalities: no decoder has a frozen tokenizer with published weights (`decoder.path`), so there "
                "is nothing to precompute. See docs/how-to/precompute.md."
            )
        self.fingerprints = codes_hashes(model, [port.modality for port in self.decoders])

    def load(self, device: torch.device) -> LoadedStage:
        """Load the tokenizers."""
        loaded = {port: load_decoder(*part, port).to(device) for port, part in self.decoders.items()}

        @torch.no_grad()
        def encode(row: RowItems, inputs: Mapping[int, Inputs]) -> Inputs:
            tensors = {}
            for index, prepared in inputs.items():
                port = row.items[index].port
                on_device = {name: tensor.to(device) for name, tensor in prepared.items()}
                tensors[f"{index}/{TARGETS}"] = loaded[port].targets([on_device])
            return tensors

        return LoadedStage(encode)

    def decodes(self, item: MediaItem) -> bool:
        """Whether the targets of an item are stored. Other items are encoded in training."""
        has_nested_items = bool(item.size.inside) or any(isinstance(run, NestedRun) for run in item.size.layout)
        return item.port in self.decoders and not has_nested_items


def decoder_has_codes(decoder: Decoder) -> bool:
    """Whether a decoder has a frozen tokenizer, and integers as targets.

    Targets with noise, such as those of flow matching, differ from epoch to epoch.
    """
    frozen = [module for module in decoder.modules() if isinstance(module, Frozen)]
    if not frozen:
        return False
    try:
        with torch.no_grad():
            inputs = {name: tensor.to("meta") for name, tensor in decoder.dummy_input().items()}
            return not deepcopy(decoder).to("meta").targets([inputs]).is_floating_point()
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # depends on values
        return True


def codes_hashes(model: ModelSection, modalities: Iterable[str]) -> dict[str, str]:
    """Return a hash of the decoder of each modality, keyed by port: the files of its tokenizer, its kind and options.

    Decoders without a folder are left out.
    """
    hashes = {}
    for name in modalities:
        settings = model.modalities[name].decoder if name in model.modalities else None
        if settings is None or settings.path is None:
            continue
        digest = xxhash.xxh3_128(repr((settings.kind, sorted((settings.options or {}).items()))).encode())
        for file in sorted(Path(local_path(settings.path)).iterdir()):
            if file.suffix in (".json", ".safetensors"):
                digest.update(file.name.encode())
                add_sampled(digest, file)
        hashes[str(Port(name, "decoder"))] = digest.hexdigest()
    return hashes


def load_decoder(decoder: Decoder, settings: SubmoduleSettings, port: Port) -> Decoder:
    """Return a copy of a decoder on the CPU whose frozen tokenizer has its weights. Other weights are zeros."""
    key = f"model.modalities.{port.modality}.decoder.path"
    folder = local_path(str(settings.path))
    inner = decoder.pretrained
    names = {id(module): name for name, module in decoder.named_modules()}
    loaded = deepcopy(decoder).to_empty(device="cpu")
    nn.Module.requires_grad_(loaded, False)
    if inner is not None:
        model_class: Any = type(inner)
        try:
            model, info = model_class.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{key}: cannot load {folder}: {first_line(error)}") from error
        if info["missing_keys"]:
            raise UserError(f"{key}: {folder} is missing weights of the tokenizer: {sorted(info['missing_keys'])[0]}")
        parent, _, leaf = names[id(inner)].rpartition(".")
        setattr(loaded.get_submodule(parent), leaf, model.requires_grad_(False))
    for module in loaded.modules():
        if isinstance(module, Frozen):
            module.load_state_dict(module.stored(), strict=False)
    return loaded.eval()
