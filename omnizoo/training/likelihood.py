"""Losses by how likely targets are: of tokens one by one, or of whole answers, which ranks may share.

Each rank adds up the values of its own tokens; the sums, one number per answer, are added up over the ranks that share
them, so that losses and gradients are those of one process.
"""

from functools import partial
from typing import Protocol

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.models.head import Logits
from omnizoo.ops.linear_cross_entropy import CHUNK
from omnizoo.ops.log_probability import by_rows, log_probabilities
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.built_in_losses import AtHead
from omnizoo.training.forward import Local

ROWS = 256  # through a head of unknown size at a time


class Answers(Protocol):
    """Which target of this rank is of which sample."""

    @property
    def samples(self) -> int: ...

    @property
    def sample_of_target(self) -> torch.Tensor: ...


class OfLogProbabilities(AtHead):
    """Sees how likely each target is, where tokens are drawn at that `temperature`."""

    def __init__(self, chunked: bool | None = None, temperature: float = 1.0) -> None:
        super().__init__(chunked)
        self.temperature = temperature

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        """By the log-probability `each [N]` of this rank's targets."""
        raise NotImplementedError

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.sharing, self.add_up = mesh.layout.sp, partial(mesh.sum_along, "sp")

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        return self.of_tokens(log_probabilities(self.tempered(logits), batch.targets), batch)

    def of_hidden(self, hidden: torch.Tensor, head: Logits, batch: Local) -> torch.Tensor:
        tempered = Logits(lambda rows: self.tempered(head(rows)), head.linear)
        return self.of_tokens(in_chunks(hidden, tempered, batch.targets), batch)

    def tempered(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.temperature == 1 else logits / self.temperature

    def sums_of(self, values: torch.Tensor, answers: Answers) -> torch.Tensor:
        """`values [K, N]` of targets, added up for each sample: `[K, samples]`. The value is that of all ranks which
        share it, the gradient goes to this rank's own targets. In fp64: long sums, of which differences are taken."""
        values = values.double()
        own = values.new_zeros(len(values), answers.samples).index_add(1, answers.sample_of_target, values)
        return self.add_up(own.detach().clone()) + (own - own.detach())


def in_chunks(hidden: torch.Tensor, head: Logits, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `targets [N]`, with few logits at a time; in backward, they are made again."""
    rows = ROWS if head.linear is None else max(1, CHUNK // len(head.linear.weight))
    return by_rows(lambda some, wanted: log_probabilities(head(some), wanted), hidden, targets, rows)
