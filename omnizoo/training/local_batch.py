"""This rank's part of a micro-batch, and the forward pass of the model on it.

With sequence parallelism, the columns are indexed to select this rank's tokens. The attention layers of the model
receive a function that attends across ranks, through the keyword arguments of the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from omnizoo.balancing.batch import Batch
from omnizoo.config.schema import Config
from omnizoo.data.sample import ROLES, Preferences
from omnizoo.data.token_fields import IGNORE_INDEX, field_of, select
from omnizoo.modalities.item import Port
from omnizoo.models.interfaces.attention import NO_CACHE, packed_inputs
from omnizoo.models.interfaces.recurrent import LocalPack
from omnizoo.models.media.batch import MediaBatch
from omnizoo.models.media.features import Features, MediaFeatures, TargetLikelihood
from omnizoo.ops.attention.bidirectional_spans import BidirectionalTokens
from omnizoo.ops.attention.packed import Pattern
from omnizoo.ops.device import to_device
from omnizoo.ops.linear_attention.recurrence import RecurrentInputs
from omnizoo.parallel.feature_exchange import FeatureRoute, exchange_features, gather_rows
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.sequence.sequence_parallel import SequenceParallel
from omnizoo.training.losses.source_sums import SourceSums

COMPUTE_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a micro-batch, on its device.

    The ranks of a sequence-parallel group have different tokens of the same packs and samples.

    Attributes:
        inputs: Keyword arguments of the model.
        columns: Further values per token, `[tokens]`, or per target, `[targets]`, depending on the column.
        num_packs: Number of packs in the micro-batch.
        num_samples: Number of samples in the micro-batch.
        is_empty: Whether this rank has no tokens. It runs the model on a dummy token; losses exclude this token.
        preferences: Roles and content hashes of the samples; None for a micro-batch without preferences.
        samples_by_role: Sample numbers, keyed by role. In a pair, the rejected response follows the chosen one.
        likely: Log-likelihoods of the targets of each decoder in the last forward pass, if a loss needs them.
        source_sums: Splits sums by source.
        media_losses: Losses of decoders and followers in the last forward pass, split by source, keyed by name.
    """

    inputs: dict[str, Any]
    columns: dict[str, torch.Tensor]
    num_packs: int
    num_samples: int
    is_empty: bool = False
    preferences: Preferences | None = None
    samples_by_role: dict[str, torch.Tensor] = field(default_factory=dict)
    likely: dict[str, TargetLikelihood] = field(default_factory=dict)
    source_sums: SourceSums = field(default_factory=SourceSums)
    media_losses: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> torch.Tensor:
        """Token ids to predict, `[targets]`. Each row of the logits has one target."""
        return self.columns["labels"]

    @property
    def loss_weights(self) -> torch.Tensor | None:
        """Weights of the targets in the loss, `[targets]`; None if all weights are 1."""
        return self.columns.get("loss_weights")

    @property
    def pack_of_token(self) -> torch.Tensor:
        """Pack number of each token in the micro-batch, `[tokens]`; -1 for dummy packs."""
        return self.columns["pack_of_token"]

    @property
    def sample_of_target(self) -> torch.Tensor:
        """Sample number of each target in the micro-batch, `[targets]`."""
        return self.columns["sample_of_token"][self.inputs["logits_to_keep"]]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of a value per target.

        Args:
            values: One value per target, `[targets]`.

        Returns:
            The sum of `values` times `loss_weights`, a scalar tensor.
        """
        if self.loss_weights is not None:
            values = values * self.loss_weights
        total = values.sum()
        self.split_by_source(total, values)
        return total

    def split_of_media(self, name: str, total: torch.Tensor) -> torch.Tensor | None:
        """Return the split by source of a loss of a decoder or follower, whose sum is `total`; None if not split."""
        if self.source_sums.source_of_sample is None:
            return None
        split = self.media_losses.get(name)  # absent if this rank has no targets
        return total.new_zeros(self.source_sums.num_sources + 1) if split is None else split

    def split_by_source(self, total: torch.Tensor, values: torch.Tensor | None) -> None:
        """Split a sum over targets by source.

        Args:
            total: The sum.
            values: `[targets]`, its summands; None if sums are not split.
        """
        if values is not None:
            self.source_sums.add(total, values, self.sample_of_target)


@dataclass(frozen=True)
class RoutedTransport:
    """Sends features to the ranks that have their placeholder tokens, along the routes of the micro-batch."""

    routes: Mapping[Port, FeatureRoute]
    mesh: Mesh
    likelihoods: dict[str, TargetLikelihood]  # filled by `on_likelihood`
    needs_likelihood: bool
    split_losses: Callable[[Port, str, torch.Tensor, torch.Tensor | None], None]
    trains_followers: bool = True

    def exchange(self, features: Mapping[Port, torch.Tensor]) -> dict[Port, MediaFeatures]:
        """Send features to the ranks that have their tokens, and return the features of this rank's tokens.

        Collective: all ranks must call it.
        """
        received = exchange_features(features, self.routes, self.mesh.world_group)
        return {port: features_by_token(rows, self.routes.get(port)) for port, rows in received.items()}

    def gather_rows(self, port: Port, states: torch.Tensor) -> torch.Tensor:
        """Return the rows of `states` that the modules of `port` on this rank need.

        Collective: all ranks must call it.
        """
        return gather_rows(states, self.routes.get(port), self.mesh.world_group)

    def on_likelihood(self, modality: str, likelihood: TargetLikelihood) -> None:
        """Store the log-likelihoods of a decoder's targets."""
        self.likelihoods[modality] = likelihood

    def on_losses(self, port: Port, name: str, losses: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Split the losses of a decoder or follower by source."""
        self.split_losses(port, name, losses, tokens)


@dataclass(frozen=True)
class MediaLossSplit:
    """Splits the losses of decoders and followers by source.

    Attributes:
        source_sums: Splits sums by source.
        sample_of_token: `[tokens]`, sample number of each token of this rank.
        sources_by_port: Index in `data.sources` of each media item that this rank processes, keyed by port.
        results: The splits, keyed by the name of the loss term.
    """

    source_sums: SourceSums
    sample_of_token: torch.Tensor
    sources_by_port: Mapping[Port, list[int]]
    results: dict[str, torch.Tensor]

    def __call__(self, port: Port, name: str, losses: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """Split the losses of the targets that `tokens` predict or, without tokens, of the items of `port`."""
        source_of_sample = self.source_sums.source_of_sample
        if source_of_sample is None:
            return
        if tokens is None:
            sources = to_device(torch.tensor(self.sources_by_port[port], dtype=torch.int64), losses.device)
        else:
            sources = source_of_sample[self.sample_of_token[tokens]]
        if losses.ndim:
            self.results[name] = self.source_sums.split(losses, sources)
        elif len(sources):
            self.results[name] = self.source_sums.unsplit(losses)


def features_by_token(rows: torch.Tensor, route: FeatureRoute | None) -> MediaFeatures:
    """Return the features that `exchange_features` received, with the indices of their tokens."""
    if route is None:  # no rank has an item of this port
        return MediaFeatures.unpredicted(rows, torch.empty(0, dtype=torch.int64, device=rows.device))
    is_trained = route.has_targets[route.previous_token >= 0]
    trained = None
    if not is_trained.all():
        trained = to_device(is_trained.nonzero().squeeze(1), rows.device)
    return MediaFeatures(Features.at(rows, route.token), Features.at(rows, route.previous_token), trained)


def localize(
    batch: Batch,
    mesh: Mesh,
    config: Config,
    ports: Sequence[Port],
    has_states: bool = False,
    bidirectional: BidirectionalTokens | None = None,
    num_sources: int = 1,
) -> LocalBatch:
    """Return this rank's part of `batch`, on the mesh's device.

    Args:
        batch: The micro-batch of this rank's sequence-parallel group.
        mesh: The mesh that the model is distributed over.
        config: The config of the run.
        ports: The encoders, decoders and followers of the model.
        has_states: Whether the model has recurrent layers.
        bidirectional: The bidirectional tokens of the model; None if it has none.
        num_sources: Number of sources to split losses by; 1 to not split them.
    """
    move = partial(to_device, device=mesh.device)
    columns, inputs = _local_tokens(batch, mesh, config, has_states, bidirectional)
    is_empty = not columns["input_ids"].shape[-1]
    is_target = columns["labels"][0] != IGNORE_INDEX
    target_index = is_target.nonzero().squeeze(1)
    inputs["logits_to_keep"] = target_index  # compute logits only for tokens that predict a target
    inputs["input_ids"] = columns.pop("input_ids")
    inputs["position_ids"] = columns.pop("position_ids")
    if is_empty:  # models cannot run without tokens, so add a dummy token
        inputs["input_ids"] = torch.zeros_like(batch.columns["input_ids"][..., :1])
        inputs["position_ids"] = batch.columns["position_ids"][..., :1]
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            inputs[name] = move(value)

    local_columns = {}
    for name, column in columns.items():
        index = target_index if field_of(name).at_targets else slice(None)
        local_columns[name] = move(column[..., 0, index])

    source_sums = SourceSums()
    if num_sources > 1:
        source_sums = SourceSums(num_sources, move(torch.tensor(batch.sources, dtype=torch.int64)))
    likely: dict[str, TargetLikelihood] = {}
    media_losses: dict[str, torch.Tensor] = {}
    if ports:
        split = MediaLossSplit(source_sums, local_columns["sample_of_token"], batch.sources_by_port, media_losses)
        needs_likelihood = config.preference_pairs != "refused"
        inputs["media"] = MediaBatch(
            items={port: batch.media.get(port, []) for port in ports},
            transport=RoutedTransport(
                batch.routes, mesh, likely, needs_likelihood=needs_likelihood, split_losses=split
            ),
            device=mesh.device,
            dtype=COMPUTE_DTYPE[config.train.precision],
        )

    samples_by_role = {}
    if batch.preferences is not None:
        for role in ROLES:
            samples = [i for i, sample_role in enumerate(batch.preferences.roles) if sample_role == role]
            samples_by_role[role] = move(torch.tensor(samples, dtype=torch.int64))

    return LocalBatch(
        inputs,
        local_columns,
        num_packs=len(batch.packs),
        num_samples=len(batch.cu_seqlens) - 1,
        is_empty=is_empty,
        preferences=batch.preferences,
        samples_by_role=samples_by_role,
        likely=likely,
        source_sums=source_sums,
        media_losses=media_losses,
    )


def _local_tokens(
    batch: Batch, mesh: Mesh, config: Config, has_states: bool, bidirectional: BidirectionalTokens | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the columns of this rank's tokens, and the model's keyword arguments for attention."""
    lengths = batch.lengths
    spans = None
    if bidirectional is not None:
        spans = bidirectional.find(batch.columns["input_ids"][0], lengths)
    if mesh.layout.sp == 1:
        inputs = packed_inputs(batch.cu_seqlens, batch.max_seqlen, spans)
        if has_states:
            inputs["states"] = LocalPack(lengths)  # the lengths are read on the host
        return dict(batch.columns), inputs
    sequence = SequenceParallel(mesh, lengths, config.parallel.overlap, spans)
    attend = sequence if len(sequence.index) else EmptyRankAttention(sequence)
    return select(batch.columns, sequence.index), NO_CACHE | {"attend": attend}


@dataclass(frozen=True)
class EmptyRankAttention:
    """Attention of a rank without tokens. It joins every collective and returns zeros for its dummy token.

    The zeros depend on the results of the collectives, so that the rank also joins the collectives of the backward
    pass.
    """

    sequence: SequenceParallel

    @property
    def longest(self) -> int:
        return self.sequence.longest

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        empty = self.sequence(query[:, :, :0], key[:, :, :0], value[:, :, :0], pattern)
        return value.new_zeros(1, 1, query.shape[1], value.shape[3]) + empty.sum()

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(x) + self.sequence.convolve(x[:0], weight, bias).sum()

    def run_recurrence(self, inputs: RecurrentInputs) -> torch.Tensor:
        return torch.zeros_like(inputs.value) + self.sequence.run_recurrence(inputs.map_tensors(lambda x: x[:0])).sum()


def run_model(model: nn.Module, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run the model on this rank's part of a micro-batch. Collective: all ranks must call it.

    Args:
        model: The model.
        batch: This rank's part of the micro-batch.

    Returns:
        The logits of the targets, `[targets, vocabulary]`, and the summed losses of the decoders, keyed by name.
    """
    batch.likely.clear()
    batch.media_losses.clear()
    out = model(**batch.inputs)
    logits = out.logits
    assert isinstance(logits, torch.Tensor)
    return logits.squeeze(0), getattr(out, "losses", None) or {}  # the backward of `[0]` would copy the logits
