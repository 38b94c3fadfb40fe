"""The `Batch` type: a micro-batch of one rank, with concatenated packs as CPU tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omnizoo.data.packing.pack import Pack
from omnizoo.data.sample import Preferences
from omnizoo.data.token_fields import concatenate, num_tokens, to_tensors
from omnizoo.modalities.item import Inputs, Port
from omnizoo.parallel.feature_exchange import FeatureRoute


@dataclass(frozen=True)
class Batch:
    """One micro-batch on a rank: concatenated packs without padding, and the media items assigned to this rank.

    Labels are shifted: `labels[0, t]` is the token at position t + 1, or IGNORE_INDEX if it is not a target.
    """

    columns: dict[str, torch.Tensor]  # [1, tokens] each; [rows, 1, tokens] for positions with several rows
    cu_seqlens: torch.Tensor  # [segments + 1] int32, boundaries of segments
    max_seqlen: int  # length of the longest segment
    sample_ids: list[str]  # source/epoch/row/part of each segment; dummy packs have none
    tokens: int  # number of tokens, without dummy packs
    packs: tuple[int, ...]  # index in the run of each pack of the micro-batch, without dummy packs
    media: dict[Port, list[Inputs]]  # inputs of the media items that this rank processes, by port
    routes: dict[Port, FeatureRoute]  # features that this rank sends and receives, by port
    # For each item in `media`: the data-parallel rank of its pack, and its index among the items of that rank.
    destinations: dict[Port, list[tuple[int, int]]] = field(default_factory=dict)
    preferences: Preferences | None = None  # role of each segment; None without preference rows
    batch_shape: tuple[int, ...] = ()  # `batch_shape` of the samples of the first pack that is not a dummy pack
    sources: list[int] = field(default_factory=list)  # index in data.sources of each segment
    # Index in data.sources of each media item that this rank processes, by port.
    sources_by_port: dict[Port, list[int]] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each segment."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        return lengths


def collate(
    packs: Sequence[Pack],
    media: dict[Port, list[Inputs]] | None = None,
    routes: dict[Port, FeatureRoute] | None = None,
    destinations: dict[Port, list[tuple[int, int]]] | None = None,
    sources_by_port: dict[Port, list[int]] | None = None,
) -> Batch:
    """Concatenate the packs of a micro-batch.

    The columns `pack_of_token` and `sample_of_token` (indices of the pack and of the segment of each token) are added,
    and `position_ids` if the packs have none.

    Args:
        packs: The packs of this rank, including dummy packs.
        media: Inputs of the media items that this rank processes, by port.
        routes: Features that this rank sends and receives, by port.
        destinations: For each item of `media`, the data-parallel rank of its pack, and its index on that rank.
        sources_by_port: Index in `data.sources` of each media item that this rank processes, by port.
    """
    lengths = np.array([length for pack in packs for length in pack.lengths])
    ends = np.cumsum(lengths)
    columns = dict(concatenate([pack.columns for pack in packs]))
    if "position_ids" not in columns:
        columns["position_ids"] = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    is_real = np.array([not pack.is_dummy for pack in packs])
    pack_numbers = np.where(is_real, np.cumsum(is_real) - 1, -1)
    columns["pack_of_token"] = np.repeat(pack_numbers, [num_tokens(pack.columns) for pack in packs])
    columns["sample_of_token"] = np.repeat(np.arange(len(lengths)), lengths)
    real_packs = [pack for pack in packs if not pack.is_dummy]
    return Batch(
        columns=to_tensors(columns),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        max_seqlen=int(lengths.max()),
        sample_ids=[id for pack in packs for id in pack.sample_ids],
        tokens=sum(num_tokens(pack.columns) for pack in real_packs),
        packs=tuple(pack.index for pack in real_packs),
        media=media or {},
        routes=routes or {},
        destinations=destinations or {},
        batch_shape=real_packs[0].batch_shape if real_packs else (),
        preferences=Preferences.concatenate([p.preferences for p in packs], [len(p.lengths) for p in packs]),
        sources=[source for pack in packs for source in pack.sources],
        sources_by_port=sources_by_port or {},
    )
