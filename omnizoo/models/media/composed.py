"""A composed model: encoders, a foundation (any causal language model) and decoders, as one Hugging Face model.

Features replace the embeddings of their placeholder tokens, and the foundation runs unchanged. The loss of a decoder
uses the hidden states of the tokens before its targets. The head of the foundation predicts text.
"""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Decoder, Modality
from omnizoo.modalities.build import build_part
from omnizoo.modalities.item import Port
from omnizoo.models.export_files import carried, set_dtype
from omnizoo.models.media.batch import MediaBatch, exchange_media
from omnizoo.models.media.composed_config import OmniConfig
from omnizoo.models.media.decoder_losses import DecoderLosses
from omnizoo.models.media.features import MediaFeatures, insert_features, placed_features
from omnizoo.models.media.media_model import MediaModel, MediaModule, MediaOutput

PREPROCESSOR = "preprocessor_config.json"


class OmniModel(MediaModel, PreTrainedModel):
    """A composed model: encoders, a foundation and decoders, as an `OmniConfig` describes them."""

    config_class = OmniConfig
    base_model_prefix = "foundation"
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config: OmniConfig, **kwargs: Any) -> None:
        super().__init__(config)
        descriptions = list(config.parts())  # checks that all components are allowed before any is built
        self.foundation: PreTrainedModel = AutoModelForCausalLM.from_config(config.foundation, trust_remote_code=False)
        config.foundation = self.foundation.config  # transformers copies the config

        width = config.foundation.hidden_size
        self.encoders: Any = nn.ModuleDict()
        self.decoders: Any = nn.ModuleDict()
        for name, role, description in descriptions:
            modules = self.encoders if role == "encoder" else self.decoders
            modules[name] = build_part(role, width, description, f"model.modalities.{name}.{role}")

        block_classes: set[str] = set()
        for part in self.parts():
            block_classes.update(getattr(part, "_no_split_modules", None) or ())
        self._no_split_modules = sorted(block_classes)
        self.post_init()  # type: ignore[no-untyped-call]

    def parts(self) -> list[PreTrainedModel]:
        """Return the Hugging Face models that this model consists of."""
        modules = [*self.encoders.values(), *self.decoders.values()]
        return [self.foundation, *(module.pretrained for module in modules if module.pretrained is not None)]

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, because modules other than Hugging Face models keep the weights that their constructors set."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save weights, config and the preprocessing settings of encoders and decoders in one folder."""
        with patch.object(self, "config", self.portable_config(Path(save_directory))):
            super().save_pretrained(save_directory, *args, **kwargs)

    def portable_config(self, out: Path) -> OmniConfig:
        """Return a copy of the config without paths that lead out of the folder `out`.

        The files that the config needs are copied to `out`.
        """
        config = deepcopy(self.config)
        assert isinstance(config, OmniConfig)
        for name, role, description in deepcopy(config).parts():
            modules = self.encoders if role == "encoder" else self.decoders
            config.modalities[name][role] |= _portable(description, modules[name], out, f"{name}_{role}")
        return config

    def get_input_embeddings(self) -> nn.Module:
        return self.foundation.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.foundation.get_output_embeddings()

    def forward(
        self, input_ids: torch.Tensor, media: MediaBatch | None = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> MediaOutput:
        embeddings = self.get_input_embeddings()(input_ids)
        if media is None:
            out = self.foundation(inputs_embeds=embeddings, logits_to_keep=logits_to_keep, **kwargs)
            return MediaOutput(logits=out.logits, losses={}, past_key_values=out.get("past_key_values"))

        embeddings, received = self.merge_features(embeddings, media)
        decoder_losses = DecoderLosses(self.built_decoders, received, media.transport)
        with decoder_losses.watching(self.foundation, before_head=True):
            out = self.foundation(inputs_embeds=embeddings, logits_to_keep=logits_to_keep, **kwargs)
        return MediaOutput(
            logits=out.logits,
            losses=decoder_losses.finish(out.logits),
            past_key_values=out.get("past_key_values"),
            last_hidden_state=decoder_losses.hidden,
        )

    def merge_features(
        self, embeddings: torch.Tensor, media: MediaBatch
    ) -> tuple[torch.Tensor, dict[Port, MediaFeatures]]:
        """Insert features into `embeddings [1, tokens, width]`.

        Also return the received features and decoder targets.
        """
        encoders = {Port(name, "encoder"): encoder for name, encoder in self.encoders.items()}
        received = exchange_media(media, self.ports_by_call, encoders, self.built_decoders)
        for placed in placed_features(received, self.built_decoders, media.dtype).values():
            embeddings = insert_features(embeddings, placed)
        return embeddings, received

    @property
    def media_modules(self) -> list[MediaModule]:
        modules: list[MediaModule] = []
        for name in self.encoders:
            path = f"encoders.{name}"
            modules.append(MediaModule(name, "encoder", path, projectors=(f"{path}.projector",)))
        for name in self.decoders:
            modules.append(MediaModule(name, "decoder", f"decoders.{name}"))
        return modules

    @property
    def built_decoders(self) -> dict[Port, Decoder]:
        return {Port(name, "decoder"): decoder for name, decoder in self.decoders.items()}

    @property
    def language(self) -> PreTrainedModel:
        return self.foundation

    def modalities(self, spec: ModelSection | None = None) -> dict[str, Modality]:
        """Return the modalities from the model's config.

        `spec` is not needed, because the modules are already built.
        """
        encoders = dict(self.encoders.items())
        decoders = dict(self.decoders.items())
        by_name = {}
        for name, description in self.config.modalities.items():
            by_name[name] = Modality(name, encoders.get(name), decoders.get(name), **description["marks"])
        return by_name


def save_model_config(model: PreTrainedModel, out: Path) -> None:
    """Write the config.json of `model` and the files that it names. The written folder can be moved.

    The config gets the dtype of the published weights, regardless of the dtype of the run.
    """
    config = model.portable_config(out) if isinstance(model, OmniModel) else deepcopy(model.config)
    published_dtype = carried(model).dtype
    if published_dtype is not None:
        set_dtype(config, published_dtype)
    config.save_pretrained(out)


def _portable(description: dict[str, Any], module: nn.Module, out: Path, name: str) -> dict[str, Any]:
    """Return replacements for fields of a component's `description` whose paths lead out of the folder `out`.

    Weights are saved with the model, and preprocessing settings are copied to the sub-folder `name`.
    """
    folder = None
    settings = Path(description.get("folder") or "") / PREPROCESSOR
    if settings.is_file():
        folder = name
        (out / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(settings, out / name / PREPROCESSOR)

    config = getattr(module, "config", None) or description.get("config")
    fields = config.to_dict() if isinstance(config, PretrainedConfig) else config
    if fields is not None:
        fields = {key: value for key, value in fields.items() if key != "_name_or_path"}
    return {"config": fields, "folder": folder}


AutoConfig.register(OmniConfig.model_type, OmniConfig)
AutoModelForCausalLM.register(OmniConfig, OmniModel)
