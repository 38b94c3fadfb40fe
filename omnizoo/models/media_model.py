"""What a model says of the media it reads and produces. A composed model says it itself, a published one by its recipe;
nothing else asks which of the two a model is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from omnizoo.config.model_section import Model
from omnizoo.modalities.base import Decoder, Item, Modality, Port
from omnizoo.modalities.base import Ids as Ids
from omnizoo.models.media_batch import MediaBatch
from omnizoo.ops.mutual import MutualTokens

Positions = Callable[[Ids, Sequence[Item]], npt.NDArray[Any]]  # of a sample: [R, L]


@dataclass(frozen=True)
class Turns:
    """Of a model that has speakers instead of an assistant, and writes no text: how a turn is written, without a chat
    template. `before`, which may name the {role} and the tokenizer's {bos_token} and {eos_token}; its text; `after`;
    then the item that the model learns to say."""

    before: str
    after: str
    role: str  # a pattern that roles have
    expected: str  # the same in words
    default: str  # the role of who says a bare text


class MediaModel:
    """As it is here, of a model that reads and writes text alone."""

    @property
    def towers(self) -> Mapping[str, str]:
        """By modality that is read: the name of the module that encodes it."""
        return {}

    @property
    def projectors(self) -> Mapping[str, tuple[str, ...]]:
        """By modality that is read: the modules between its tower and the language model, inside of the tower."""
        return {}

    @property
    def producers(self) -> Mapping[str, tuple[str, ...]]:
        """By modality that is produced: the names of the modules that only its decoder runs, if any."""
        return {}

    @property
    def produced_by(self) -> Mapping[str, Decoder]:
        """By modality that is produced: its decoder, in this very model."""
        return {}

    @property
    def followers(self) -> Mapping[str, str]:
        """By modality that is produced beside the sequence: the name of the module that follows it."""
        return {}

    @property
    def idle(self) -> Sequence[str]:
        """Modules that no training step runs: they stay as they are."""
        return ()

    @property
    def ports(self) -> list[Port]:
        """In the order in which the model runs them."""
        inside = [Port(name, "encoder") for name in self.towers] + [Port(name, "decoder") for name in self.producers]
        return inside + [Port(name, "follower") for name in self.followers]

    @property
    def calls(self) -> list[list[Port]]:
        """The ports, by call of a module: ranks wait for each other in each, so that is what they share out evenly."""
        return [[port] for port in self.ports]

    @property
    def language(self) -> PreTrainedModel:
        """The module that takes embeddings and gives logits."""
        raise NotImplementedError

    @property
    def positions(self) -> Positions | None:
        """None: tokens are counted."""
        return None

    @property
    def turns(self) -> Turns | None:
        """None: conversations are as the chat template has them, and the model writes text."""
        return None

    def embed(self, ids: torch.Tensor, media: MediaBatch) -> torch.Tensor:
        """`[T, width]`: a prompt `ids [T]` with its media, as the language model takes it. If it has `turns`."""
        raise NotImplementedError

    @property
    def mutual(self) -> MutualTokens | None:
        """Tokens that see each other, run by run, where all others look back. None: there are none."""
        return None

    def modalities(self, spec: Model) -> dict[str, Modality]:
        """Content types by name, with modules of this very model. Built once, however often it is asked."""
        return {}

    def attach(self, spec: Model) -> None:
        """Let the model's forward take `media` (a `MediaBatch`), once it has its weights and is sharded."""
