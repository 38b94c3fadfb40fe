"""Media of a published model, by its recipe; and `media_model`, which answers for any model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.following import FOLLOWED, build_followers, follow, has_part
from omnizoo.assembly.producing import Producing
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Decoder, Modality, Port
from omnizoo.models.build import tokenizer_folder
from omnizoo.models.media_batch import MediaBatch
from omnizoo.models.media_model import MediaModel, Positions, Turns
from omnizoo.ops.mutual import MutualTokens
from omnizoo.recipes.base import recipe_for

KEPT = "_omnizoo_media"  # where a model keeps what is said of it, so that its modalities are built once


def media_model(model: nn.Module) -> MediaModel:
    """What `model` says of media: a composed one itself, any other by its recipe."""
    if isinstance(model, MediaModel):
        return model
    if KEPT not in vars(model):
        setattr(model, KEPT, Published(model))
    media = vars(model)[KEPT]
    assert isinstance(media, Published)
    return media


class Published(MediaModel):
    """A Hugging Face model, or a user's own module, as its recipe describes it; most read text alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.recipe = model, recipe_for(model)
        self.built: dict[str, Modality] | None = None
        # What the model is called with, with media in it, once `attach` was called.
        self.entered: Callable[[dict[str, Any], MediaBatch], dict[str, Any]]
        self.producing: Producing | None = None

    @property
    def towers(self) -> Mapping[str, str]:
        return {name: tower for name, tower in self.recipe.towers.items() if self._has(tower)}

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        return {name: self.recipe.projectors.get(name, ()) for name in self.towers}

    def _has(self, name: str) -> bool:
        """Smaller or larger models of a family may lack a part."""
        *path, last = name.split(".")
        return getattr(self.model.get_submodule(".".join(path)), last, None) is not None

    @property
    def producers(self) -> Mapping[str, tuple[str, ...]]:
        return self.recipe.producers

    @property
    def produced_by(self) -> Mapping[str, Decoder]:
        return {name: decoder for name, modality in (self.built or {}).items() if (decoder := modality.decoder)}

    @property
    def calls(self) -> list[list[Port]]:
        sharing: dict[str, list[Port]] = {}  # by tower; a decoder is called by itself
        for port in self.ports:
            sharing.setdefault(self.towers[port.modality] if port.role == "encoder" else str(port), []).append(port)
        return list(sharing.values())

    @property
    def language(self) -> PreTrainedModel:
        language = self.model.get_submodule(self.recipe.language)
        assert isinstance(language, PreTrainedModel)
        return language

    @property
    def followers(self) -> Mapping[str, str]:
        return {name: part for name, (part, _) in self.recipe.followers.items() if has_part(self.model, part)}

    @property
    def idle(self) -> Sequence[str]:
        return [part for part in self.recipe.idle if has_part(self.model, part)]

    @property
    def positions(self) -> Positions | None:
        return partial(self.recipe.positions, self.language) if self.recipe.positions else None

    @property
    def mutual(self) -> MutualTokens | None:
        return self.recipe.mutual(self.language) if self.recipe.mutual else None

    @property
    def turns(self) -> Turns | None:
        return self.recipe.turns

    def modalities(self, spec: Model) -> dict[str, Modality]:
        if self.recipe.modalities is None:
            return {}
        if self.built is None:
            parts = {name: m.encoder for name, m in spec.modalities.items()}
            parts |= {str(Port(name, "decoder")): m.decoder for name, m in spec.modalities.items()}
            options = {name: part.options for name, part in parts.items() if part}
            self.built = self.recipe.modalities(self.language, tokenizer_folder(spec), options)
            self.built |= build_followers(self.model, self.recipe, self.followers, spec)
        if unknown := set(spec.modalities) - set(self.built):
            raise UserError(
                f"model.modalities: {type(self.model).__name__} has no {min(unknown)!r}, but {', '.join(self.built)}"
            )
        return self.built

    def embed(self, ids: torch.Tensor, media: MediaBatch) -> torch.Tensor:
        embeddings: torch.Tensor = self.entered({"input_ids": ids[None]}, media)["inputs_embeds"]
        if self.producing is not None:
            self.producing.forget()
        return embeddings[0]

    def attach(self, spec: Model) -> None:
        """A hook encodes media, and hands their features over as the family wants them."""
        enter, modalities = self.recipe.enter, self.modalities(spec)
        if enter is None:
            return
        encoders = {port: modalities[port.modality].encoder for port in self.ports if port.role == "encoder"}
        producing = self.producing = Producing(self.language, self.produced_by) if self.producers else None

        def encode(media: MediaBatch) -> dict[Port, torch.Tensor]:
            made: dict[Port, torch.Tensor] = {}
            for ports in self.calls:
                if (encoder := encoders.get(ports[0])) is not None:
                    made |= media.encode_together(ports, encoder)
            made |= producing.targets(media) if producing else {}
            return {port: made[port] for port in self.ports if port in made}

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            media: MediaBatch | None = kwargs.pop("media", None)
            if media is not None:
                followed = {FOLLOWED: (media, kwargs["input_ids"])} if followers else {}
                kwargs = entered(kwargs, media) | followed
            return args, kwargs

        def entered(inputs: dict[str, Any], media: MediaBatch) -> dict[str, Any]:
            arrived = media.deliver(encode(media))
            placed = {port.modality: arrived[port].placed for port in encoders}
            placed = producing.place(arrived, placed, media.dtype) if producing else placed
            return enter(self.language, inputs, placed)

        self.entered = entered
        self.model.register_forward_pre_hook(hook, with_kwargs=True)
        followers = {port: f for port in self.ports if (f := modalities[port.modality].follower) is not None}
        if followers:
            follow(self.model, self.language, followers)
