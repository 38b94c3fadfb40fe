"""Followers of multimodal HF models: decoders beside the token sequence, such as a talker.

They read hidden states of the language model. Their losses are computed after it in the same forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.plugins import check_call
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Follower, Modality, term_name
from omnizoo.modalities.item import Port
from omnizoo.models.media.batch import MediaBatch
from omnizoo.models.media.media_model import MediaModule

States = dict[Port, list[torch.Tensor]]  # hidden states that `Follower.capture` stored


def build_followers(model: nn.Module, modules: Sequence[MediaModule], spec: ModelSection) -> dict[str, Modality]:
    """Build the followers, keyed by modality, with the options of `model.modalities.NAME.decoder`."""
    built = {}
    for module in modules:
        options = _follower_options(module.modality, spec)
        assert module.follower is not None, f"the recipe names no class for {module.port}"
        key = f"model.modalities.{module.modality}.decoder.options"
        check_call(module.follower, str(module.port), key, [model], options)
        follower = module.follower(model, **options)
        built[module.modality] = Modality(module.modality, None, None, "", "", "", follower=follower)
    return built


def _follower_options(name: str, spec: ModelSection) -> Mapping[str, Any]:
    """Return the options of a follower from the config. Raise a `UserError` if other keys are set."""
    settings = spec.modalities.get(name)
    if settings is None:
        return {}
    if settings.encoder is not None or settings.projector is not None:
        raise UserError(
            f"model.modalities.{name}: the model generates this modality and does not read it, so `encoder` and "
            "`projector` have no effect. Use `decoder`."
        )
    if settings.decoder is None:
        return {}
    for key in ("kind", "path", "config"):
        if getattr(settings.decoder, key) is not None:
            raise UserError(
                f"model.modalities.{name}.decoder.{key}: not supported, because the model contains this decoder. "
                "Remove the key."
            )
    return settings.decoder.options


@contextmanager
def capture_states(followers: Mapping[Port, Follower]) -> Iterator[States]:
    """Context manager for the forward pass of the language model. Yields the hidden states that each follower reads."""
    with ExitStack() as stack:
        yield {port: stack.enter_context(follower.capture()) for port, follower in followers.items()}


def follower_losses(
    followers: Mapping[Port, Follower], states: States, input_ids: torch.Tensor, media: MediaBatch
) -> dict[str, torch.Tensor]:
    """Return the losses, summed over targets and keyed by name."""
    losses = {}
    for port, follower in followers.items():
        rows = follower.rows_from(states[port], input_ids.flatten())
        for term, loss in media.follower_losses(port, follower, rows).items():
            name = term_name(port.modality, term)
            losses[name] = loss.sum()
            if media.items[port]:
                media.transport.on_losses(port, name, loss.detach(), None)
    return losses
