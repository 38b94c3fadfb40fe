"""The media that a model reads and generates.

A composed model describes its media itself; the recipe describes the media of an HF model. Other code uses `MediaModel`
for both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Decoder, Follower, Modality
from omnizoo.modalities.item import Ids, MediaItem, Port, Role
from omnizoo.models.media.batch import MediaBatch
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens

# Returns the position ids of one sample, [position axes, tokens]. M-RoPE has 4 axes: text, time, height and width.
Positions = Callable[[Ids, Sequence[MediaItem]], npt.NDArray[Any]]


@dataclass(frozen=True)
class MediaModule:
    """A module of a model that encodes or generates a modality. Several records may describe the same decoder."""

    modality: str
    role: Role
    module: str  # path; empty for a decoder that runs only modules of the language model
    projectors: tuple[str, ...] = ()  # for encoders only: paths of modules between encoder and language model
    follower: Callable[..., Follower] | None = None  # for followers only: the class of the follower

    @property
    def port(self) -> Port:
        return Port(self.modality, self.role)

    def within(self, parent: str) -> "MediaModule":
        """Return a copy of this record for a larger model, in which this model is the submodule `parent`."""
        projectors = tuple(f"{parent}.{name}" for name in self.projectors)
        return replace(self, module=f"{parent}.{self.module}", projectors=projectors)


@dataclass(frozen=True)
class SpeakerFormat:
    """The format of turns for a model that has speakers instead of an assistant, and generates no text.

    No chat template is used. A turn consists of `before`, its text, `after`, and the media item to predict. `before`
    may contain {role}, {bos_token} and {eos_token}. The latter two are replaced by the tokens of the tokenizer.
    """

    before: str
    after: str
    role: str  # regular expression that roles match
    expected: str  # description of valid roles, for messages
    default: str  # role for plain text


@dataclass
class MediaOutput(ModelOutput):
    """The output of a forward pass with media."""

    logits: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] | None = None  # losses of decoders and followers, summed over targets
    past_key_values: Any = None
    last_hidden_state: torch.Tensor | None = None


class MediaModel:
    """Interface to the media of a model. The defaults describe a model that reads and generates text only."""

    @property
    def media_modules(self) -> Sequence[MediaModule]:
        """The encoders, decoders and followers of this model."""
        return ()

    def modules_of(self, role: Role) -> list[MediaModule]:
        return [module for module in self.media_modules if module.role == role]

    @property
    def built_decoders(self) -> Mapping[Port, Decoder]:
        """The decoders of this model instance."""
        return {}

    @property
    def idle(self) -> Sequence[str]:
        """Paths of modules that no training step runs. They stay unchanged."""
        return ()

    @property
    def ports(self) -> list[Port]:
        """The ports in the order in which the model runs them."""
        roles: tuple[Role, ...] = ("encoder", "decoder", "follower")
        return list(dict.fromkeys(module.port for role in roles for module in self.modules_of(role)))

    @property
    def ports_by_call(self) -> list[list[Port]]:
        """The ports, grouped by call: modalities with the same encoder module share one call.

        Ranks wait for each other in each call, so items are balanced per call.
        """
        calls: dict[str, list[Port]] = {}
        for port in self.ports:
            encoders = [module.module for module in self.modules_of("encoder") if module.port == port]
            calls.setdefault(encoders[0] if encoders else str(port), []).append(port)
        return list(calls.values())

    @property
    def language(self) -> PreTrainedModel:
        """The module that maps embeddings to logits."""
        raise NotImplementedError

    @property
    def positions(self) -> Positions | None:
        """The function that returns the positions of a sample's tokens. None if they are 0, 1, 2, ..."""
        return None

    @property
    def speaker_format(self) -> SpeakerFormat | None:
        """The format of turns. None if conversations follow the chat template and the model generates text."""
        return None

    def embed(self, ids: torch.Tensor, media: MediaBatch) -> torch.Tensor:
        """Embed a prompt `ids [tokens]` with its media to `[tokens, width]`, for models with a `speaker_format`."""
        raise NotImplementedError

    @property
    def bidirectional(self) -> BidirectionalTokens | None:
        """The bidirectional tokens. None if all attention is causal."""
        return None

    def modalities(self, spec: ModelSection) -> dict[str, Modality]:
        """Return the modalities, keyed by name, with the modules of this model instance. They are built once."""
        return {}

    def attach(self, spec: ModelSection) -> None:
        """Make the model's forward accept `media` (a `MediaBatch`).

        Must be called after sharding and loading weights.
        """
