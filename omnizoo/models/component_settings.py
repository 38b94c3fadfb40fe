"""Settings of the components of a model: `freeze`, `lr`, `dtype` and `recompute`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.model import ModalitySettings, ModelSection, ProjectorSettings
from omnizoo.config.sections.optimizer import ParameterGroupSettings
from omnizoo.modalities.base import Encoder
from omnizoo.models.adapters.lora import attached
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.media.media_model import MediaModule
from omnizoo.models.parameter_patterns import frozen, group_parameters
from omnizoo.ops.precision import compute_in

DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ComponentSetting:
    """The settings of one component."""

    freeze: bool = False
    lr: float | None = None  # peak learning rate; None: the run's
    dtype: torch.dtype | None = None
    recompute: str | None = None  # None: the run's setting


class ComponentSettings:
    """Settings by parameter or module name.

    The settings of the innermost component apply. `groups` select single parameters by pattern and take precedence over
    the settings of their component.
    """

    def __init__(self, model: nn.Module, spec: ModelSection, groups: Sequence[ParameterGroupSettings] = ()) -> None:
        self.groups = group_parameters(model, groups)
        self.frozen = frozen(model, spec.freeze)
        self.by_prefix: dict[str, ComponentSetting] = {"": ComponentSetting()}
        self.media = media_model(model)
        if spec.foundation is not None:
            self._add("foundation", spec.foundation, "model.foundation")
        for name, modality in spec.modalities.items():
            for module in self.media.media_modules:
                if module.modality == name:
                    self._add_module(module, modality)
        self.by_prefix |= dict.fromkeys(self.media.idle, ComponentSetting(freeze=True))

    def _add_module(self, module: MediaModule, modality: ModalitySettings) -> None:
        """Add the settings of one encoder, decoder or follower, and of the encoder's projectors."""
        key = f"model.modalities.{module.modality}"
        if module.role != "encoder":
            if modality.decoder and module.module:
                self._add(module.module, modality.decoder, f"{key}.decoder")
            return
        if modality.encoder:
            self._add(module.module, modality.encoder, f"{key}.encoder")
        if modality.encoder or modality.projector:
            for projector in module.projectors:
                self._add(projector, modality.projector or ProjectorSettings(), f"{key}.projector")

    def _add(self, prefix: str, part: SubmoduleSettings | ProjectorSettings, key: str) -> None:
        """Add the settings of the module `prefix`.

        Raise a `UserError` if a shared module already has different settings.
        """
        if isinstance(part, SubmoduleSettings) and part.dtype == "bf16" and not part.freeze:
            raise UserError(f"{key}.dtype: bf16 weights cannot be trained; set {key}.freeze: true, or leave dtype out")
        wanted = ComponentSetting(part.freeze, part.lr)
        if isinstance(part, SubmoduleSettings):
            wanted = ComponentSetting(part.freeze, part.lr, DTYPES.get(part.dtype), part.recompute)
        known = self.by_prefix.setdefault(prefix, wanted)
        if known != wanted:
            raise UserError(
                f"{key} is treated otherwise than another modality that goes through the same module ({prefix}): give "
                "both the same freeze, lr, dtype and recompute"
            )

    def keep_precision(self, model: nn.Module) -> None:
        """Let components with a `dtype` compute in it. The modules around them are unaffected."""
        for prefix, treatment in self.by_prefix.items():
            if treatment.dtype is None:
                continue
            part: Any = model.get_submodule(prefix)
            tower = part.pretrained if isinstance(part, Encoder) else part
            encoders = {module.module for module in self.media.modules_of("encoder")}
            if tower is None or prefix not in encoders:
                raise UserError(f"{prefix}: dtype is for encoders around a Hugging Face model; leave it out here")
            compute_in(tower, treatment.dtype)

    def of(self, name: str) -> ComponentSetting:
        """Return the settings of the innermost component that contains `name`."""
        while name not in self.by_prefix:
            name = name.rpartition(".")[0]
        return self.by_prefix[name]

    def freeze(self, model: nn.Module) -> None:
        """Set `requires_grad` of all parameters. A parameter that is already frozen stays frozen."""
        adapter = attached(model)
        for name, parameter in model.named_parameters():
            is_adapted = adapter is not None and name in adapter.trained
            if is_adapted and name in self.frozen:
                raise UserError(
                    f"model.freeze: {name} is part of model.adapter, which keeps all else frozen as it is; leave it out"
                )
            if is_adapted and self.of(name).freeze:
                raise UserError(
                    f"model.adapter: {name} is in a part with freeze: true; an adapter keeps all else frozen, so leave "
                    "freeze out there, or exclude the part"
                )
            parameter.requires_grad_(not self.is_frozen(name) and parameter.requires_grad)

    def is_frozen(self, name: str) -> bool:
        """Whether the config freezes the parameter `name`."""
        group = self.groups.get(name)
        return self.of(name).freeze or name in self.frozen or (group is not None and group.freeze)

    def apply(self, model: nn.Module) -> None:
        """Freeze parameters and set the dtype of weights. Must be called before the model is sharded.

        A model may already be completely frozen, such as a teacher. It is an error if the config freezes everything.
        """
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        self.freeze(model)
        for name, parameter in model.named_parameters():
            treatment = self.of(name)
            if treatment.dtype is not None:
                parameter.data = parameter.data.to(treatment.dtype)
        if is_trained and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("model: every parameter is frozen, so there is nothing to train; freeze less")
