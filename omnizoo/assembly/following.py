"""Published models of which a part follows the language model (`Follower`): it is built by the recipe, and its losses
are made in the same forward pass, once the language model is through."""

from collections.abc import Mapping
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Follower, Modality, Port, term_name
from omnizoo.models.media_batch import MediaBatch
from omnizoo.models.omni import OmniOutput
from omnizoo.recipes.base import Recipe

FOLLOWED = "followed"  # the keyword that carries media and ids past the language model


def has_part(model: nn.Module, name: str) -> bool:
    """Some folders come without the parts that speak."""
    return hasattr(model, name.partition(".")[0])


def build_followers(model: nn.Module, recipe: Recipe, followers: Mapping[str, str], spec: Model) -> dict[str, Modality]:
    built = {}
    for name in followers:
        given, kind = spec.modalities.get(name), recipe.followers[name][1]
        if given is not None and (given.encoder is not None or given.projector is not None):
            raise UserError(f"model.modalities.{name}: the model says it, and does not read it; use `decoder`")
        part = given.decoder if given is not None else None
        for key in ("kind", "path", "config") if part is not None else ():
            if getattr(part, key) is not None:
                raise UserError(f"model.modalities.{name}.decoder.{key}: the model has its own; leave the key out")
        options = part.options if part is not None else {}
        try:
            signature(kind).bind(model, **options)
        except TypeError as error:
            raise UserError(f"model.modalities.{name}.decoder.options: {error}") from error
        built[name] = Modality(name, None, None, "", "", "", follower=kind(model, **options))
    return built


def follow(model: nn.Module, language: PreTrainedModel, followers: Mapping[Port, Follower]) -> None:
    """Let `model`, whose forward is that of its language model, also give the losses of its followers."""

    def forward(**kwargs: Any) -> Any:
        followed: tuple[MediaBatch, torch.Tensor] | None = kwargs.pop(FOLLOWED, None)
        if followed is None or followed[0].collect is None:
            return language(**kwargs)
        media, ids = followed
        with ExitStack() as stack:
            kept = {port: stack.enter_context(follower.reading()) for port, follower in followers.items()}
            out = language(**kwargs)
        losses = {}
        for port, follower in followers.items():
            states = follower.read(kept[port], ids.flatten())
            for term, loss in media.follow(port, follower, states).items():
                losses[term_name(port.modality, term)] = loss
        return OmniOutput(out.logits, losses)

    model.forward = forward
