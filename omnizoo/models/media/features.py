"""Features of media items and targets of decoders, with the indices of their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omnizoo.modalities.base import Decoder, VocabularyDecoder
from omnizoo.modalities.item import Port
from omnizoo.ops.device import to_device


@dataclass(frozen=True)
class Features:
    """Encoder features or decoder targets, one row for each token of this rank that has one."""

    values: torch.Tensor  # [N, width], one row for each of N tokens
    index: torch.Tensor  # [N], int64: token of each row, in this rank's slice

    @classmethod
    def at(cls, rows: torch.Tensor, tokens: torch.Tensor) -> "Features":
        """Return the rows whose token is on this rank.

        `tokens [N]`, in host memory, contains the index of each row's token; -1 if the token is on another rank.
        """
        local_rows = (tokens >= 0).nonzero().squeeze(1)
        values = rows if len(local_rows) == len(rows) else rows[to_device(local_rows, rows.device)]
        return cls(values, to_device(tokens[local_rows], rows.device))


@dataclass(frozen=True)
class MediaFeatures:
    """Features or targets that this rank received from one port."""

    placed: Features  # rows of the placeholder tokens
    predicted: Features  # for decoders only: targets, with the tokens that predict them
    trained: torch.Tensor | None = None  # rows of `predicted` that contribute to the decoder's loss; if None, all

    @classmethod
    def unpredicted(cls, rows: torch.Tensor, index: torch.Tensor) -> "MediaFeatures":
        """Return features of placeholder tokens that no token predicts, such as features of a prompt."""
        return cls(Features(rows, index), Features(rows[:0], index[:0]))


@dataclass(frozen=True)
class TargetLikelihood:
    """Log-likelihood of a decoder's targets, for the tokens of this rank that predict these targets."""

    log_likelihood: torch.Tensor  # [N], one value for each of N targets
    values: torch.Tensor  # [N], number of values in each target
    index: torch.Tensor  # [N], int64: token that predicts the target, in this rank's slice


def insert_features(embeddings: torch.Tensor, features: Features) -> torch.Tensor:
    """Replace the rows of `embeddings [1, tokens, width]` at the tokens of `features`.

    `features` has indices instead of a mask, because counting the tokens of a mask would need a host sync.
    """
    index = features.index
    return embeddings.index_put((torch.zeros_like(index), index), features.values.to(embeddings.dtype))


def placed_features(
    received: Mapping[Port, MediaFeatures], decoders: Mapping[Port, Decoder], dtype: torch.dtype
) -> dict[Port, Features]:
    """Return the features for placeholder tokens: encoder features, and embedded targets of decoders."""
    placed = {port: features.placed for port, features in received.items()}
    for port, decoder in decoders.items():
        if not isinstance(decoder, VocabularyDecoder):  # the language model embeds the ids of its vocabulary
            targets = placed[port].values
            targets = targets.to(dtype) if targets.is_floating_point() else targets
            placed[port] = Features(decoder.embed(targets), placed[port].index)
    return placed


def join_by_modality(placed: Mapping[Port, Features]) -> dict[str, Features]:
    """Return the features by modality. If a modality has an encoder and a decoder, their features are concatenated."""
    joined: dict[str, Features] = {}
    for port, features in placed.items():
        first = joined.get(port.modality)
        if first is not None:
            values = torch.cat([first.values, features.values.to(first.values.dtype)])
            features = Features(values, torch.cat([first.index, features.index]))
        joined[port.modality] = features
    return joined
