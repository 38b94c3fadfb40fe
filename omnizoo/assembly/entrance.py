"""What the loader and the loop need of a model: its modalities without weights, and logits only where asked for."""

import logging
from copy import deepcopy
from inspect import signature
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.parts import Treatments
from omnizoo.assembly.published import KEPT, media_model
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.models.build import RECIPE

log = logging.getLogger(__name__)
Model_ = TypeVar("Model_", bound=nn.Module)


def read_modalities(model: nn.Module, spec: Model) -> dict[str, Any]:
    """`modalities`, `positions` and `turns`, as the loader takes them: copies without weights of what `model` (on meta)
    has."""
    media = media_model(model)
    if not media.ports:
        if spec.modalities:
            raise UserError(
                f"model.modalities: {type(model).__name__} reads text only; compose it: move its path or config to "
                "model.foundation"
            )
        return _text_only(model, spec)
    if spec.text_only:
        raise UserError(
            f"model.text_only: {type(model).__name__} is fed its media, and takes rows without them as well; leave the "
            "key out"
        )
    media.modalities(spec)  # here, so that they are copied with the model, and not built again
    skeleton = _skeleton(model, spec)
    said = media_model(skeleton)
    found = {"modalities": said.modalities(spec), "positions": said.positions, "turns": said.turns}
    for name in (KEPT, RECIPE):  # not for loader workers: a user's recipe may hold what no other process can be given
        vars(skeleton).pop(name, None)
    return found


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
