"""Media of a published model, by its recipe; and `media_model`, which answers for any model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.modalities.base import Modality, Port
from omnizoo.models.build import tokenizer_folder
from omnizoo.models.media_batch import MediaBatch
from omnizoo.models.media_model import MediaModel, Positions
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

    @property
    def towers(self) -> Mapping[str, str]:
        return self.recipe.towers

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        return self.recipe.projectors

    @property
    def calls(self) -> list[list[Port]]:
        sharing: dict[str, list[Port]] = {}  # by tower
        for port in self.ports:
            sharing.setdefault(self.towers[port.modality], []).append(port)
        return list(sharing.values())

    @property
    def language(self) -> PreTrainedModel:
        assert isinstance(self.model, PreTrainedModel)
        return self.model

    @property
    def positions(self) -> Positions | None:
        return partial(self.recipe.positions, self.language) if self.recipe.positions else None

    def modalities(self, spec: Model) -> dict[str, Modality]:
        if self.recipe.modalities is None:
            return {}
        if self.built is None:
            options = {name: m.encoder.options for name, m in spec.modalities.items() if m.encoder}
            self.built = self.recipe.modalities(self.language, tokenizer_folder(spec), options)
        if unknown := set(spec.modalities) - set(self.built):
            raise UserError(
                f"model.modalities: {type(self.model).__name__} has no {min(unknown)!r}, but {', '.join(self.built)}"
            )
        return self.built

    def attach(self, spec: Model) -> None:
        """A hook encodes media, and hands their features over as the family wants them."""
        enter, modalities = self.recipe.enter, self.modalities(spec)
        if enter is None:
            return
        encoders = {port: encoder for port in self.ports if (encoder := modalities[port.modality].encoder) is not None}

        def encode(media: MediaBatch) -> dict[Port, torch.Tensor]:
            made: dict[Port, torch.Tensor] = {}
            for ports in self.calls:
                made |= media.encode_together(ports, encoders[ports[0]])
            return {port: made[port] for port in encoders}

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            media: MediaBatch | None = kwargs.pop("media", None)
            if media is not None:
                arrived = media.deliver(encode(media))
                placed = {port.modality: features.placed for port, features in arrived.items()}
                kwargs = enter(self.language, kwargs, placed)
            return args, kwargs

        self.model.register_forward_pre_hook(hook, with_kwargs=True)
