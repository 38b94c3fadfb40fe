"""A composed omni model: encoders, a foundation (any causal language model) and decoders, as one Hugging Face model.

Features of media take the places of their placeholders among the embeddings; the foundation runs untouched; each
decoder's loss is on the hidden states before its targets. Text is what the foundation's own head predicts.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Decoder, Encoder, Modality, term_name
from omnizoo.modalities.build import build_part, check_code
from omnizoo.models.hf_private import trunk
from omnizoo.models.media_batch import Delivered, Likely, MediaBatch
from omnizoo.models.media_model import MediaModel
from omnizoo.models.published_files import carried, set_dtype

PREPROCESSOR = "preprocessor_config.json"
ROLES = ("encoder", "decoder")
MARKS = ("begin", "placeholder", "end")
NEVER_FROM_FILES = ("allow_code", "is_own", "_name_or_path")


class OmniConfig(PretrainedConfig):
    """`foundation`: the language model's config. `modalities`: name -> {encoder, decoder, marks}, plain mappings.

    Two things are said by whoever loads it and never by a file: `allow_code`, modules besides OmniZoo's own that it may
    name as encoders and decoders (`from_pretrained(folder, allow_code=["my_package"])`); and `is_own`, that it is the
    user's own config, which may name any module and any folder.
    """

    model_type = "omnizoo"
    sub_configs = {"foundation": AutoConfig}  # noqa: RUF012 - as transformers declares it
    allow_code = cast(tuple[str, ...], ())  # an annotation would make it a field of what transformers saves
    is_own = False

    def __init__(
        self,
        foundation: dict[str, Any] | PretrainedConfig | None = None,
        modalities: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(foundation, dict):
            fields = dict(foundation)
            foundation = AutoConfig.for_model(fields.pop("model_type", None), **fields)
        self.foundation = foundation
        self.modalities = check_description(modalities or {})
        # a file may say none of these: it would allow itself what it likes
        super().__init__(**{key: value for key, value in kwargs.items() if key not in NEVER_FROM_FILES})

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.foundation if self.foundation is not None else self

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in NEVER_FROM_FILES}

    def parts(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(modality, role, description) of each, allowed to be built, its `folder` as a path that can be opened."""
        if self.foundation is None:
            raise UserError("a composed model needs a foundation: the config of its language model")
        for name, spec in self.modalities.items():
            for role in ROLES:
                if part := spec.get(role):
                    key = f"model.modalities.{name}.{role}"
                    if not self.is_own:
                        check_code(role, part["kind"], key, self.allow_code)
                        check_folder(part, key)
                    if part.get("folder"):  # inside of the model's own, where it was saved with it
                        part = part | {"folder": str(Path(self.name_or_path or "") / part["folder"])}
                    yield name, role, part


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Of a composed model, the config of its foundation; of any other, its own."""
    language: PretrainedConfig = config.get_text_config() if isinstance(config, OmniConfig) else config
    return language


def check_description(modalities: Any) -> dict[str, Any]:
    """`modalities` as written in a config.json: of the shape that everything else takes for granted."""
    wanted = "modalities of a composed model: a mapping of names to {encoder, decoder, marks} was expected"
    if not isinstance(modalities, dict):
        raise UserError(f"{wanted}, not {type(modalities).__name__}")
    for name, spec in modalities.items():
        marks = spec.get("marks") if isinstance(spec, dict) else None
        if (
            not isinstance(marks, dict)
            or set(marks) != set(MARKS)
            or not all(isinstance(m, str) for m in marks.values())
        ):
            raise UserError(f"{wanted}; `marks` of {name!r} must be the texts {', '.join(MARKS)}")
        for role in ROLES:
            part = spec.get(role)
            if part is not None and not (isinstance(part, dict) and isinstance(part.get("kind"), str)):
                raise UserError(f"{wanted}; the {role} of {name!r} has no kind")
            given = part or {}
            kinds = {"options": dict, "config": dict, "folder": str, "projector": dict}
            for key, kind in kinds.items():
                if given.get(key) is not None and not isinstance(given[key], kind):
                    raise UserError(f"{wanted}; {role}.{key} of {name!r} is not a {kind.__name__}")
    return modalities


def check_folder(part: dict[str, Any], key: str) -> None:
    """A folder may name what is inside of it, and nothing else."""
    folders = [part.get("folder"), (part.get("options") or {}).get("folder")]
    for folder in folders:
        if folder and (Path(folder).is_absolute() or ".." in Path(folder).parts):
            raise UserError(f"{key}.folder: its config.json names {folder}, which is outside of the model's folder")


@dataclass
class OmniOutput(ModelOutput):
    logits: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] | None = None  # of each decoder, summed over its targets
    past_key_values: Any = None
    last_hidden_state: torch.Tensor | None = None


class OmniModel(MediaModel, PreTrainedModel):
    config_class = OmniConfig
    base_model_prefix = "foundation"
    _supports_attention_backend = True
    _supports_sdpa = True

    def __init__(self, config: OmniConfig, **kwargs: Any) -> None:
        super().__init__(config)
        parts = list(config.parts())  # all of them are allowed before any is built
        self.foundation: PreTrainedModel = AutoModelForCausalLM.from_config(config.foundation, trust_remote_code=False)
        config.foundation = self.foundation.config  # transformers copies what it builds from
        width = config.foundation.hidden_size
        self.encoders, self.decoders = nn.ModuleDict(), nn.ModuleDict()
        for name, role, part in parts:
            modules = self.encoders if role == "encoder" else self.decoders
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
        self.config = self.portable_config(Path(save_directory))
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.config = own

    def portable_config(self, out: Path) -> OmniConfig:
        """Its config without paths to elsewhere; what it needs from there is copied to `out`."""
        config = deepcopy(self.config)
        assert isinstance(config, OmniConfig)
        for name, role, part in deepcopy(config).parts():
            module = (self.encoders if role == "encoder" else self.decoders)[name]
            config.modalities[name][role] |= _portable(part, module, out, f"{name}_{role}")
        return config

    def get_input_embeddings(self) -> nn.Module:
        return self.foundation.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.foundation.get_output_embeddings()

    def forward(
        self, input_ids: torch.Tensor, media: MediaBatch | None = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> OmniOutput:
        embeddings = self.get_input_embeddings()(input_ids)
        labels: dict[str, Delivered] = {}
        if media is not None:
            embeddings, labels = self.enter(embeddings, media)
        seen: list[torch.Tensor] = []
        losses: dict[str, torch.Tensor] = {}

        def produce(hidden: torch.Tensor) -> None:
            seen.append(hidden)
            for name, label in labels.items():
                own = self.predict(name, hidden[0, label.predicted.index], label, media)
                losses.update((term_name(name, term), loss) for term, loss in own.items())

        # Before the head runs: a loss there may be on whole answers, whatever they are made of.
        with last_hidden_state(self.foundation, produce):
            out = self.foundation(inputs_embeds=embeddings, logits_to_keep=logits_to_keep, **kwargs)
        return OmniOutput(out.logits, losses, out.get("past_key_values"), seen[0])

    def predict(
        self, name: str, hidden: torch.Tensor, label: Delivered, media: MediaBatch | None
    ) -> dict[str, torch.Tensor]:
        """The losses of a decoder, summed over its targets; `media` is told how likely they are, if it asks."""
        decoder, targets = self.decoder(name), label.predicted
        if media is not None and media.tell is not None and decoder.has_likelihood():
            media.tell(name, Likely(*decoder.log_likelihood(hidden, targets.values), targets.index))
        if label.learnt is None:
            return decoder.losses(hidden, targets.values)
        return decoder.losses(hidden[label.learnt], targets.values[label.learnt])

    def enter(self, embeddings: torch.Tensor, media: MediaBatch) -> tuple[torch.Tensor, dict[str, Delivered]]:
        """`embeddings [1, T, width]` with media in their places; and by decoder the targets to be predicted."""
        encoders = {port: self.encoder(port.modality) for port in self.ports if port.role == "encoder"}
        decoders = {port: self.decoder(port.modality) for port in self.ports if port.role == "decoder"}
        made = {port: media.encode(port, encoder) for port, encoder in encoders.items()}
        made |= {port: media.targets(port, decoder) for port, decoder in decoders.items()}
        delivered = media.deliver(made)
        for port in made:
            values, index = delivered[port].placed.values, delivered[port].placed.index
            if port in decoders:  # targets are precise; what is fed back in is an activation
                given = values.to(media.dtype) if values.is_floating_point() else values
                values = decoders[port].embed(given)
            embeddings = embeddings.index_put((torch.zeros_like(index), index), values.to(embeddings.dtype))
        return embeddings, {port.modality: delivered[port] for port in decoders}

    @property
    def towers(self) -> dict[str, str]:
        return {name: f"encoders.{name}" for name in self.encoders}

    @property
    def projectors(self) -> dict[str, tuple[str, ...]]:
        return {name: (f"encoders.{name}.projector",) for name in self.encoders}

    @property
    def producers(self) -> dict[str, tuple[str, ...]]:
        return {name: (f"decoders.{name}",) for name in self.decoders}

    @property
    def produced_by(self) -> dict[str, Decoder]:
        return {name: self.decoder(name) for name in self.decoders}

    @property
    def language(self) -> PreTrainedModel:
        return self.foundation

    def modalities(self, spec: Model | None = None) -> dict[str, Modality]:
        """As its own config says: `spec` was for building it."""
        return {
            name: Modality(
                name,
                self.encoder(name) if name in self.encoders else None,
                self.decoder(name) if name in self.decoders else None,
                **described["marks"],
            )
            for name, described in self.config.modalities.items()
        }

    def encoder(self, name: str) -> Encoder:
        module = self.encoders[name]
        assert isinstance(module, Encoder)
        return module

    def decoder(self, name: str) -> Decoder:
        module = self.decoders[name]
        assert isinstance(module, Decoder)
        return module


def save_model_config(model: PreTrainedModel, out: Path) -> None:
    """Write the config.json of `model` and what goes with it: a folder that means the same wherever it is moved to.

    Its dtype is the one that the weights were published in, whatever the run holds them in.
    """
    config = model.portable_config(out) if isinstance(model, OmniModel) else deepcopy(model.config)
    if (dtype := carried(model).dtype) is not None:
        set_dtype(config, dtype)
    config.save_pretrained(out)


def _portable(spec: dict[str, Any], module: nn.Module, out: Path, name: str) -> dict[str, Any]:
    """`spec` without paths to elsewhere: weights are saved with the model, and preprocessing settings copied."""
    config = getattr(module, "config", None) or spec.get("config")
    settings = Path(spec.get("folder") or "") / PREPROCESSOR
    if not settings.is_file():
        name = ""
    else:
        (out / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(settings, out / name / PREPROCESSOR)
    fields = config.to_dict() if isinstance(config, PretrainedConfig) else config
    if fields is not None:
        fields = {key: value for key, value in fields.items() if key != "_name_or_path"}
    return {"config": fields, "folder": name or None}


@contextmanager
def last_hidden_state(model: PreTrainedModel, keep: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Hand what the head of a causal language model sees to `keep`: the model itself returns logits only."""
    handle = trunk(model).register_forward_hook(lambda module, inputs, out: keep(out[0]))
    try:
        yield
    finally:
        handle.remove()


AutoConfig.register(OmniConfig.model_type, OmniConfig)
AutoModelForCausalLM.register(OmniConfig, OmniModel)
