"""A composed omni model: encoders, a foundation (any causal language model) and decoders, as one Hugging Face model.

Rows of media take the places of their placeholders among the embeddings; the foundation runs untouched; each decoder's
loss is on the hidden states before its rows. Text is what the foundation's own head predicts.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from omnizoo.modalities.base import Decoder, Encoder, Modality
from omnizoo.modalities.build import build_part
from omnizoo.models.media import MediaBatch

PREPROCESSOR = "preprocessor_config.json"


class OmniConfig(PretrainedConfig):
    """`foundation`: the language model's config. `modalities`: name -> {encoder, decoder, marks}, plain mappings."""

    model_type = "omnizoo"
    sub_configs = {"foundation": AutoConfig}  # noqa: RUF012 - as transformers declares it

    def __init__(
        self,
        foundation: dict[str, Any] | PretrainedConfig | None = None,
        modalities: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(foundation, dict):
            fields = dict(foundation)
            foundation = AutoConfig.for_model(fields.pop("model_type"), **fields)
        self.foundation = foundation
        self.modalities = modalities or {}
        super().__init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.foundation if self.foundation is not None else self


@dataclass
class OmniOutput(ModelOutput):
    logits: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] | None = None  # of each decoder, summed over its rows
    past_key_values: Any = None
    last_hidden_state: torch.Tensor | None = None


class OmniModel(PreTrainedModel):
    config_class = OmniConfig
    base_model_prefix = "foundation"
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config: OmniConfig, **kwargs: Any) -> None:
        super().__init__(config)
        self.foundation: PreTrainedModel = AutoModelForCausalLM.from_config(config.foundation)
        config.foundation = self.foundation.config  # transformers copies what it builds from
        width = config.foundation.hidden_size
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        for name, spec in config.modalities.items():
            for role, modules in (("encoder", self.encoders), ("decoder", self.decoders)):
                if part := spec.get(role):
                    if part.get("folder"):  # inside of the model's own, where it was saved with it
                        part = part | {"folder": str(Path(config.name_or_path or "") / part["folder"])}
                    modules[name] = build_part(role, width, part, f"model.modalities.{name}.{role}")
        self._no_split_modules = sorted(
            {block for part in self.parts() for block in getattr(part, "_no_split_modules", None) or ()}
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def parts(self) -> list[PreTrainedModel]:
        """The Hugging Face models it is made of."""
        modules: list[Any] = [*self.encoders.values(), *self.decoders.values()]
        return [self.foundation, *(module.pretrained for module in modules if module.pretrained is not None)]

    def _init_weights(self, module: nn.Module) -> None:
        """Modules outside of Hugging Face models begin as their constructors leave them."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """One folder for all of it: weights, config, and how encoders and decoders were told to preprocess."""
        own = self.config
        self.config = deepcopy(own)
        for name, spec in self.config.modalities.items():
            for role, modules in (("encoder", self.encoders), ("decoder", self.decoders)):
                if name in modules:
                    spec[role] |= _portable(spec[role], modules[name], Path(save_directory), f"{name}_{role}")
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config = own

    def get_input_embeddings(self) -> nn.Module:
        return self.foundation.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.foundation.get_output_embeddings()

    def forward(
        self, input_ids: torch.Tensor, media: MediaBatch | None = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> OmniOutput:
        embeddings = self.get_input_embeddings()(input_ids)
        labels: dict[str, Any] = {}
        if media is not None:
            embeddings, labels = self.enter(embeddings, media)
        hidden: list[torch.Tensor] = []
        with last_hidden_state(self.foundation, hidden.append):
            out = self.foundation(inputs_embeds=embeddings, logits_to_keep=logits_to_keep, **kwargs)
        losses = {
            name: self.decoder(name).loss(hidden[0][0, arrived.index], arrived.rows) for name, arrived in labels.items()
        }
        return OmniOutput(out.logits, losses, out.get("past_key_values"), hidden[0])

    def enter(self, embeddings: torch.Tensor, media: MediaBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        """`embeddings [1, T, width]` with rows of media in their places; and by decoder the rows to be predicted."""
        features = {f"{name}/encoder": media.encode(f"{name}/encoder", self.encoder(name)) for name in self.encoders}
        targets = {f"{name}/decoder": media.targets(f"{name}/decoder", self.decoder(name)) for name in self.decoders}
        arrived = media.deliver(features) if features else {}
        produced = media.deliver(targets) if targets else {}
        for port, rows in [*arrived.items(), *produced.items()]:
            name, _, role = port.partition("/")
            values = rows.rows
            if role == "decoder":  # targets are precise; what is fed back in is an activation
                given = values.to(media.dtype) if values.is_floating_point() else values
                values = self.decoder(name).embed(given)
            embeddings = embeddings.index_put((torch.zeros_like(rows.index), rows.index), values.to(embeddings.dtype))
        labels = media.deliver_labels(targets) if targets else {}
        return embeddings, {port.partition("/")[0]: rows for port, rows in labels.items()}

    def encoder(self, name: str) -> Encoder:
        module = self.encoders[name]
        assert isinstance(module, Encoder)
        return module

    def decoder(self, name: str) -> Decoder:
        module = self.decoders[name]
        assert isinstance(module, Decoder)
        return module


def _portable(spec: dict[str, Any], module: nn.Module, out: Path, name: str) -> dict[str, Any]:
    """`spec` without paths to elsewhere: weights are saved with the model, and preprocessing settings copied."""
    config = getattr(module, "config", None) or spec.get("config")
    settings = Path(spec.get("folder") or "") / PREPROCESSOR
    if not settings.is_file():
        name = ""
    else:
        (out / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(settings, out / name / PREPROCESSOR)
    return {"config": config.to_dict() if isinstance(config, PretrainedConfig) else config, "folder": name or None}


def modalities_of(model: OmniModel) -> dict[str, Modality]:
    """The content types of a composed model; of a model on meta, what a loader takes."""
    return {
        name: Modality(
            name,
            model.encoder(name) if name in model.encoders else None,
            model.decoder(name) if name in model.decoders else None,
            **spec["marks"],
        )
        for name, spec in model.config.modalities.items()
    }


@contextmanager
def last_hidden_state(model: PreTrainedModel, keep: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Hand what the head of a causal language model sees to `keep`: the model itself returns logits only."""
    handle = model.base_model.register_forward_hook(lambda module, inputs, out: keep(out[0]))
    try:
        yield
    finally:
        handle.remove()


AutoConfig.register(OmniConfig.model_type, OmniConfig)
AutoModelForCausalLM.register(OmniConfig, OmniModel)
