"""Collect the arguments of the data loader that depend on the model, such as its modalities, without weights."""

import logging
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.media.hf_model import MEDIA_ATTRIBUTE, media_model
from omnizoo.models.recipe import RECIPE

log = logging.getLogger(__name__)


def read_modalities(model: nn.Module, spec: ModelSection) -> dict[str, Any]:
    """Return the arguments of the data loader that depend on the model.

    Args:
        model: The model, on meta.
        spec: The section `model` of the config.

    Returns:
        `modalities`, `positions` and `turns` from a copy of `model` without weights. For a text-only model, the dict is
        empty, or contains the `reserved` placeholder ids of inputs that are not used.

    Raises:
        UserError: If the config and the model disagree about media.
    """
    media = media_model(model)
    if not media.ports:
        if spec.modalities:
            raise UserError(
                f"model.modalities: {type(model).__name__} reads only text. To compose a model with it, move its path "
                "or config to model.foundation."
            )
        return _text_only(model, spec)
    if spec.text_only:
        raise UserError(
            f"model.text_only: not needed, because {type(model).__name__} accepts rows with and without media. "
            "Remove the key."
        )
    media.modalities(spec)  # build the modalities first, so they are copied with the model
    skeleton = deepcopy(model)
    ComponentSettings(skeleton, spec).freeze(skeleton)  # the cost of an item depends on which modules are frozen
    copied_media = media_model(skeleton)
    loader_arguments = {
        "modalities": copied_media.modalities(spec),
        "positions": copied_media.positions,
        "turns": copied_media.speaker_format,
    }

    # These attributes are not passed to loader workers, because a user's recipe may not be picklable.
    for name in (MEDIA_ATTRIBUTE, RECIPE):
        vars(skeleton).pop(name, None)
    return loader_arguments


def _text_only(model: nn.Module, spec: ModelSection) -> dict[str, Any]:
    """Check that a multimodal model without a recipe has `model.text_only`, and reserve its placeholder ids."""
    unread = unread_inputs(model)
    if not unread:
        return {}

    listed = ", ".join(unread)
    family = type(model).__name__
    if not spec.text_only:
        raise UserError(
            f"model: {family} reads {listed} in addition to text, but no recipe supports these inputs. "
            "Set model.text_only: true to train it only on text."
        )
    log.warning("%s is trained only on text, because no recipe supports its inputs: %s.", family, listed)

    fields = [f"{name}_token_{suffix}" for name in unread for suffix in ("id", "index")]
    ids = {getattr(model.config, field, None) for field in fields}
    return {"reserved": sorted(id for id in ids if isinstance(id, int))}


def unread_inputs(model: nn.Module) -> list[str]:
    """Return the non-text inputs of a published model.

    Text models that share code with a multimodal family declare such inputs, too, but their configs have no
    sub-configs.
    """
    if not isinstance(model, PreTrainedModel) or not model.config.sub_configs:
        return []
    declared = model.input_modalities
    inputs = (declared,) if isinstance(declared, str) else declared
    return [name for name in inputs if name != "text"]
