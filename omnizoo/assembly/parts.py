"""How the parts of a model are treated: frozen or trained, how fast, in which precision, recomputed or not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from omnizoo.assembly.groups import Groups, frozen
from omnizoo.assembly.published import media_model
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model, Projector
from omnizoo.config.schema import Config
from omnizoo.config.section import Part
from omnizoo.config.train_section import ParameterGroup
from omnizoo.modalities.base import Encoder
from omnizoo.models.adapter import attached
from omnizoo.ops.precision import compute_in

# What an optimizer keeps of a trained parameter, in copies of it; 8-bit state is saved as fp32.
HELD_STATE = {"adamw": 2, "muon": 1, "adafactor": 0, "adamw_8bit": 0.5}
SAVED_STATE = HELD_STATE | {"adamw_8bit": 2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Treatment:
    freeze: bool = False
    lr: float | None = None  # peak; None: the run's
    dtype: torch.dtype | None = None
    recompute: str | None = None  # None: as the run does


class Treatments:
    """By parameter or module name; the most deeply nested part that has one decides. `groups` are of single
    parameters, by pattern, and go before what their part says."""

    def __init__(self, model: nn.Module, spec: Model, groups: Sequence[ParameterGroup] = ()) -> None:
        self.groups = Groups(model, groups)
        self.frozen = frozen(model, spec.freeze)
        self.by_prefix: dict[str, Treatment] = {"": Treatment()}
        self.media = media_model(model)
        if spec.foundation is not None:
            self._add("foundation", spec.foundation, "model.foundation")
        for name, modality in spec.modalities.items():
            tower, projectors = self.media.towers.get(name), self.media.projectors.get(name, ())
            if tower and modality.encoder:
                self._add(tower, modality.encoder, f"model.modalities.{name}.encoder")
            for projector in projectors if modality.projector or modality.encoder else ():
                self._add(projector, modality.projector or Projector(), f"model.modalities.{name}.projector")
            for producer in self.media.producers.get(name, ()):
                if modality.decoder:
                    self._add(producer, modality.decoder, f"model.modalities.{name}.decoder")
            if modality.decoder and (follower := self.media.followers.get(name)):
                self._add(follower, modality.decoder, f"model.modalities.{name}.decoder")
        self.by_prefix |= dict.fromkeys(self.media.idle, Treatment(freeze=True))

    def _add(self, prefix: str, part: Part | Projector, key: str) -> None:
        if isinstance(part, Part) and part.dtype == "bf16" and not part.freeze:
            raise UserError(f"{key}.dtype: bf16 weights cannot be trained; set {key}.freeze: true, or leave dtype out")
        wanted = Treatment(part.freeze, part.lr)
        if isinstance(part, Part):
            wanted = replace(wanted, dtype=DTYPES[part.dtype] if part.dtype else None, recompute=part.recompute)
        known = self.by_prefix.setdefault(prefix, wanted)
        if known != wanted:
            raise UserError(
                f"{key} is treated otherwise than another modality that goes through the same module ({prefix}): give "
                "both the same freeze, lr, dtype and recompute"
            )

    def keep_precision(self, model: nn.Module) -> None:
        """Let parts whose weights have a precision of their own compute in it, and nobody around them notice."""
        for prefix, treatment in self.by_prefix.items():
            if treatment.dtype is None:
                continue
            part: Any = model.get_submodule(prefix)
            tower = part.pretrained if isinstance(part, Encoder) else part
            if tower is None or prefix not in self.media.towers.values():
                raise UserError(f"{prefix}: dtype is for encoders around a Hugging Face model; leave it out here")
            compute_in(tower, treatment.dtype)

    def of(self, name: str) -> Treatment:
        while name not in self.by_prefix:
            name = name.rpartition(".")[0]
        return self.by_prefix[name]

    def freeze(self, model: nn.Module) -> None:
        adapter = attached(model)
        for name, parameter in model.named_parameters():
            if adapter is not None and name in adapter.trained and name in self.frozen:
                raise UserError(
                    f"model.freeze: {name} is part of model.adapter, which keeps all else frozen as it is; leave it out"
                )
            if adapter is not None and name in adapter.trained and self.of(name).freeze:
                raise UserError(
                    f"model.adapter: {name} is in a part with freeze: true; an adapter keeps all else frozen, so leave "
                    "freeze out there, or exclude the part"
                )
            parameter.requires_grad_(not self.is_frozen(name) and parameter.requires_grad)

    def is_frozen(self, name: str) -> bool:
        group = self.groups.of(name)
        return self.of(name).freeze or name in self.frozen or (group is not None and group.freeze)

    def apply(self, model: nn.Module) -> None:
        """Freeze, and set the precision of weights: before the model is sharded.

        A model may come with all of it frozen, such as a teacher; but not become so by the config.
        """
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        self.freeze(model)
        for name, parameter in model.named_parameters():
            treatment = self.of(name)
            if treatment.dtype is not None:
                parameter.data = parameter.data.to(treatment.dtype)
        if is_trained and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("model: every parameter is frozen, so there is nothing to train; freeze less")


def saved_bytes(model: nn.Module, config: Config) -> int:
    """What a checkpoint of `model` (on meta) takes, about: weights (with an adapter, trained ones only), and of trained
    ones what the optimizer keeps."""
    adapter = attached(model)
    return _bytes(model, config, SAVED_STATE, gradients=0, only=adapter.trained if adapter else None)


def held_bytes(model: nn.Module, config: Config) -> int:
    """What training `model` (on meta) takes in memory, over all ranks that share it and without activations."""
    return _bytes(model, config, HELD_STATE, gradients=1)


def _bytes(
    model: nn.Module, config: Config, state: Mapping[str, float], gradients: int, only: Collection[str] | None = None
) -> int:
    """What an optimizer of one's own keeps is not known, and counts as nothing."""
    treatments, run = Treatments(model, config.model, config.optimizer.groups), config.optimizer
    total = 0.0
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        treatment, group = treatments.of(name), treatments.groups.of(name)
        copies = 1.0
        if parameter.requires_grad and not treatments.is_frozen(name):
            kind = (group and group.kind) or run.kind
            moments = state.get(kind, 0) / (2 if run.moments == "bf16" and kind == "adamw" else 1)
            copies += gradients + moments + (run.ema is not None)
        total += parameter.numel() * (treatment.dtype or parameter.dtype).itemsize * copies
    return int(total)
