"""One packed micro-batch through the model on this rank: its slice of the tokens, its share of the losses.

Sequence parallelism enters here and nowhere else: tokens, positions and labels are picked by the slice's index, and the
model's own attention is handed, through its keyword arguments, the function that attends across ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from omnizoo.config.run_sections import Parallel
from omnizoo.data.deal import Batch
from omnizoo.data.flat_pack import IGNORE
from omnizoo.data.rendered import ROLES
from omnizoo.modalities.base import Port
from omnizoo.models.media_batch import Delivered, Features, Likely, MediaBatch
from omnizoo.models.stateful import Whole
from omnizoo.ops.attention import Pattern
from omnizoo.ops.device import to_device
from omnizoo.ops.mutual import Mutual, MutualTokens
from omnizoo.ops.recurrence import Steps
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.route import Route, collect, deliver
from omnizoo.parallel.sequence import SequenceParallel

# A cache, or any 2-D attention mask, would silently switch off the isolation of packed samples.
NO_CACHE: dict[str, Any] = {"use_cache": False}
COMPUTE_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LocalAnswers:
    """Which targets of this rank are of which answers, in preferences."""

    samples: int  # of the micro-batch, which ranks may share
    sample_of_target: torch.Tensor  # [N]
    of_role: dict[str, torch.Tensor]  # the samples that are such answers; a pair's rejected one is next to its chosen
    sample_of_token: torch.Tensor | None = None  # [T]
    keys: Sequence[str] = ()  # of each sample, if asked for: a hash of its content


@dataclass(frozen=True)
class LocalGiven:
    """Numbers that samples came with, for each target of this rank."""

    samples: int  # of the micro-batch, which ranks may share
    sample_of_target: torch.Tensor  # [N]
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name: [N], float64


@dataclass(frozen=True)
class Local:
    """What of a micro-batch is this rank's."""

    inputs: dict[str, Any]  # the model's keyword arguments
    targets: torch.Tensor  # [N] token ids, one per row of the logits that come out
    weights: torch.Tensor | None  # [N] of the loss on each target, by the rows of the dataset; None: 1
    pack_of_token: torch.Tensor  # [T] which pack of the micro-batch
    packs: int  # of the micro-batch, which ranks may share
    is_filler: bool = False  # this rank has no token of its own; the one it runs counts nowhere
    answers: LocalAnswers | None = None  # None: the micro-batch has no preferences
    given: LocalGiven | None = None  # None: its samples came with no further numbers
    likely: dict[str, Likely] = field(default_factory=dict)  # by decoder, if asked: what the last forward pass told

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a value for each target, `[N]`, by the weights of the targets."""
        return values.sum() if self.weights is None else (values * self.weights).sum()


def packed_inputs(cu_seqlens: torch.Tensor, max_seqlen: int, mutual: Mutual | None = None) -> dict[str, Any]:
    """What tells a model where the samples of a pack begin and end, and which of its tokens see each other."""
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    seen = {} if mutual is None else {"mutual": mutual}
    return NO_CACHE | lengths | {"max_length_q": max_seqlen, "max_length_k": max_seqlen} | seen


def localize(
    batch: Batch,
    mesh: Mesh,
    parallel: Parallel,
    ports: Sequence[Port],
    has_states: bool = False,
    mutual: MutualTokens | None = None,
    asks_likelihood: bool = False,
) -> Local:
    """This rank's part of `batch`, on the mesh's device; for a model with `ports`, media included. `has_states`: it has
    layers with a state along the sequence. `mutual`: tokens that see each other in it. `asks_likelihood`: decoders tell
    how likely their targets are."""
    likely: dict[str, Likely] = {}
    ids, positions, labels, packs = batch.input_ids, batch.position_ids, batch.labels, batch.pack_of_token
    weights, lengths = batch.weights, batch.cu_seqlens.diff()
    samples = torch.arange(len(lengths)).repeat_interleave(lengths)  # of each token
    extra = batch.extra
    is_filler = False
    stretches = None if mutual is None else mutual.find(ids[0], lengths.tolist())
    if mesh.layout.sp == 1:
        inputs = packed_inputs(batch.cu_seqlens, batch.max_seqlen, stretches)
        if has_states:
            inputs["states"] = Whole(lengths.tolist())  # read on the host, where they are
    else:
        sequence = SequenceParallel(mesh, lengths.tolist(), parallel.overlap, stretches)
        index = sequence.index
        samples = samples[index]
        ids, positions, labels, packs = ids[:, index], positions[..., index], labels[:, index], packs[index]
        weights = None if weights is None else weights[:, index]
        extra = {name: numbers[:, index] for name, numbers in extra.items()}
        is_filler = not len(index)
        inputs = NO_CACHE | {"attend": Filler(sequence) if is_filler else sequence}
        if is_filler:  # models cannot run on no token at all: give them one that nobody sees
            ids, positions = torch.zeros_like(batch.input_ids[:, :1]), batch.position_ids[..., :1]
    moved = partial(to_device, device=mesh.device)
    # Logits are made only where there is a target.
    kept = (labels[0] != IGNORE).nonzero().squeeze(1)
    inputs |= {"input_ids": ids, "position_ids": positions, "logits_to_keep": kept}
    inputs = {key: moved(value) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    if ports:
        inputs["media"] = MediaBatch(
            items={port: batch.media.get(port, []) for port in ports},
            deliver=lambda made: _deliver(made, batch.routes, mesh),
            device=mesh.device,
            dtype=COMPUTE_DTYPE[parallel.precision],
            tell=likely.__setitem__ if asks_likelihood else None,
            collect=lambda port, states: collect(states, batch.routes.get(port), mesh.world_group),
        )
    weights = None if weights is None else moved(weights[0, kept])
    answers = None
    if batch.roles:
        places = {role: [i for i, own in enumerate(batch.roles) if own == role] for role in ROLES}
        of_role = {role: moved(torch.tensor(place, dtype=torch.int64)) for role, place in places.items()}
        answers = LocalAnswers(len(lengths), moved(samples[kept]), of_role, moved(samples), batch.keys)
    given = None
    if extra:
        numbers = {name: moved(values[0, kept]) for name, values in extra.items()}
        given = LocalGiven(len(lengths), moved(samples[kept]), numbers)
    targets = moved(labels[0, kept])
    return Local(inputs, targets, weights, moved(packs), len(batch.packs), is_filler, answers, given, likely)


@dataclass(frozen=True)
class Filler:
    """What a rank without tokens does: it takes part in every exchange with none, and gives its filler zeros.

    The graph must reach the exchange, or this rank would not answer the others in backward.
    """

    sequence: SequenceParallel

    @property
    def longest(self) -> int:
        return self.sequence.longest

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        none = self.sequence(query[:, :, :0], key[:, :, :0], value[:, :, :0], pattern)
        return value.new_zeros(1, 1, query.shape[1], value.shape[3]) + none.sum()

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(x) + self.sequence.convolve(x[:0], weight, bias).sum()

    def carry(self, steps: Steps) -> torch.Tensor:
        return torch.zeros_like(steps.value) + self.sequence.carry(steps.each(lambda x: x[:0])).sum()


def forward(model: nn.Module, local: Local) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits `[N, V]` at this rank's targets, and the losses of what else the model produces, summed."""
    local.likely.clear()
    out = model(**local.inputs)
    logits = out.logits
    assert isinstance(logits, torch.Tensor)
    return logits.squeeze(0), getattr(out, "losses", None) or {}  # not `[0]`, whose backward copies all of it


def _deliver(made: dict[Port, torch.Tensor], routes: dict[Port, Route], mesh: Mesh) -> dict[Port, Delivered]:
    delivered = deliver(made, routes, mesh.world_group)
    return {
        port: Delivered(
            Features(arrived.features, arrived.place), Features(arrived.predicted, arrived.before), arrived.learnt
        )
        for port, arrived in delivered.items()
    }
