"""What a model reads besides text: the modalities of a composed model, or those of a published one by its recipe."""

import logging
from copy import deepcopy
from functools import partial
from inspect import signature
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.parts import Treatments
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.modalities.base import Port
from omnizoo.models.build import tokenizer_folder
from omnizoo.models.media_batch import MediaBatch
from omnizoo.models.omni import OmniModel, modalities_of
from omnizoo.recipes.base import recipe_for

log = logging.getLogger(__name__)
Model_ = TypeVar("Model_", bound=nn.Module)


def read_modalities(model: nn.Module, spec: Model) -> dict[str, Any]:
    """`modalities` and `positions`, as the loader takes them: copies without weights of what `model` has (on meta)."""
    if isinstance(model, OmniModel):
        return {"modalities": modalities_of(_skeleton(model, spec))}
    recipe = recipe_for(model)
    given = set(spec.modalities)
    if recipe.modalities is None:
        if given:
            raise UserError(
                f"model.modalities: {type(model).__name__} reads text only; compose it: move its path or config to "
                "model.foundation"
            )
        return _text_only(model, spec)
    if spec.text_only:
        raise UserError(
            f"model.text_only: {type(model).__name__} has a recipe that feeds its media, and takes rows without them "
            "as well; leave the key out"
        )
    assert isinstance(model, PreTrainedModel)
    options = {name: m.encoder.options for name, m in spec.modalities.items() if m.encoder}
    skeleton = _skeleton(model, spec)
    modalities = recipe.modalities(skeleton, tokenizer_folder(spec), options)
    if unknown := given - set(modalities):
        raise UserError(
            f"model.modalities: {type(model).__name__} has no {min(unknown)!r}, but {', '.join(modalities)}"
        )
    positions = partial(recipe.positions, skeleton) if recipe.positions else None
    return {"modalities": modalities, "positions": positions}


def _skeleton(model: Model_, spec: Model) -> Model_:
    """A copy whose parts are frozen as `spec` says: what an item costs depends on it."""
    skeleton = deepcopy(model)
    Treatments(skeleton, spec).freeze(skeleton)
    return skeleton


def _text_only(model: nn.Module, spec: Model) -> dict[str, Any]:
    """A model whose other inputs nobody feeds must be meant to be trained so. Their placeholders are reserved."""
    if not (unread := unread_inputs(model)):
        return {}
    listed, family = ", ".join(unread), type(model).__name__
    if not spec.text_only:
        raise UserError(
            f"model: {family} reads {listed} besides text, and has no recipe that feeds them; "
            "model.text_only: true trains it on text alone"
        )
    log.warning("%s is trained on text alone: nothing feeds its %s", family, listed)
    keys = [f"{name}_token_{kind}" for name in unread for kind in ("id", "index")]
    ids = {getattr(model.config, key, None) for key in keys}
    return {"reserved": sorted(id for id in ids if isinstance(id, int))}


def unread_inputs(model: nn.Module) -> list[str]:
    """What a published model reads besides text. Text models that share code with such a one say so, too, but their
    configs have no parts."""
    if not isinstance(model, PreTrainedModel) or not model.config.sub_configs:
        return []
    inputs = model.input_modalities
    return [name for name in ((inputs,) if isinstance(inputs, str) else inputs) if name != "text"]


def media_ports(model: nn.Module) -> list[Port]:
    """The modules of a model that make rows of media, in the order in which it runs them."""
    if isinstance(model, OmniModel):
        return model.ports("encoder") + model.ports("decoder")
    return [Port(name, "encoder") for name in recipe_for(model).towers]


def keep_logits(model: nn.Module) -> None:
    """Let a model whose forward makes logits of all tokens make those of `logits_to_keep` only."""
    if not isinstance(model, PreTrainedModel) or "logits_to_keep" in signature(type(model).forward).parameters:
        return
    kept: list[Any] = []

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kept[:] = [kwargs.pop("logits_to_keep")] if "logits_to_keep" in kwargs else []
        return args, kwargs

    def select(module: nn.Module, args: Any) -> Any:
        return (args[0][:, kept.pop()], *args[1:]) if kept else None

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.get_output_embeddings().register_forward_pre_hook(select)


def attach_media(model: nn.Module, spec: Model) -> None:
    """Let a published model take `media`: a hook encodes them, and hands their rows over as the family wants them."""
    recipe = recipe_for(model)
    if recipe.modalities is None:
        return
    assert isinstance(model, PreTrainedModel)
    assert recipe.enter is not None
    enter = recipe.enter
    options = {name: m.encoder.options for name, m in spec.modalities.items() if m.encoder}
    encoders = {
        Port(name, "encoder"): modality.encoder
        for name, modality in recipe.modalities(model, tokenizer_folder(spec), options).items()
        if modality.encoder is not None
    }

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        media: MediaBatch | None = kwargs.pop("media", None)
        if media is not None:
            rows = media.deliver({port: media.encode(port, encoder) for port, encoder in encoders.items()})
            kwargs = enter(model, kwargs, {port.modality: arrived for port, arrived in rows.items()})
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
