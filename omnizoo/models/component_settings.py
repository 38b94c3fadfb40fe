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
    lr: float | None = None  # peak learning rate; if None, the learning rate of the run
    dtype: torch.dtype | None = None
    recompute: str | None = None  # recompute mode; if None, the mode of the run


class ComponentSettings:
    """The settings of all components, looked up by parameter or module name.

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
            raise UserError(f"{key}.dtype: bf16 weights cannot be trained. Set {key}.freeze: true, or remove dtype.")
        setting = ComponentSetting(part.freeze, part.lr)
        if isinstance(part, SubmoduleSettings):
            setting = ComponentSetting(part.freeze, part.lr, DTYPES.get(part.dtype), part.recompute)

        previous = self.by_prefix.setdefault(prefix, setting)
        if previous != setting:
            raise UserError(
                f"{key}: the settings differ from those of another modality that uses the same module ({prefix}). Set "
                "freeze, lr, dtype and recompute of both modalities to the same values."
            )

    def keep_precision(self, model: nn.Module) -> None:
        """Make each component that sets `dtype` compute in this dtype. The modules around it are unaffected."""
        encoders = {module.module for module in self.media.modules_of("encoder")}
        for prefix, setting in self.by_prefix.items():
            if setting.dtype is None:
                continue
            component: Any = model.get_submodule(prefix)
            tower = component.pretrained if isinstance(component, Encoder) else component
            if tower is None or prefix not in encoders:
                raise UserError(
                    f"{prefix}: dtype is supported only for encoders that contain a Hugging Face model. Remove dtype."
                )
            compute_in(tower, setting.dtype)

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
                    f"model.freeze: {name} is trained by model.adapter, which already freezes all other weights. "
                    "Remove the pattern."
                )
            if is_adapted and self.of(name).freeze:
                raise UserError(
                    f"model.adapter: {name} is in a component with freeze: true. Remove freeze there (an adapter "
                    "already freezes all other weights), or exclude the component from the adapter."
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
            setting = self.of(name)
            if setting.dtype is not None:
                parameter.data = parameter.data.to(setting.dtype)
        if is_trained and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("model: the config freezes every parameter. Leave at least one parameter trainable.")
