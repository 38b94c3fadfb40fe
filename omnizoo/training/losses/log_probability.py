"""Losses on log-probabilities of targets: of single tokens, or of complete responses.

With sequence parallelism, several ranks have tokens of the same response. Each rank sums the values of its tokens, and
an all-reduce adds these sums, one number per response. Losses and gradients therefore match those of one process.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.models.interfaces.lm_head import Logits
from omnizoo.ops.loss.linear_cross_entropy import CHUNK
from omnizoo.ops.loss.log_probability import by_rows, log_probabilities
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.text import HeadLoss

ROWS = 256  # hidden states per chunk if the size of the head is unknown


class LogProbabilityLoss(HeadLoss):
    """Base class of losses on the log-probability of each target, with logits divided by `temperature`."""

    def __init__(self, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.temperature = temperature

    def of_tokens(self, each: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the sum of the loss, given the log-probabilities `each` of this rank's targets, `[targets]`."""
        raise NotImplementedError

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.sharing, self.add_up = mesh.layout.sp, partial(mesh.sum_along, "sp")

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        return self.of_tokens(log_probabilities(self.tempered(logits), batch.targets), batch)

    def from_hidden(self, hidden: torch.Tensor, head: Logits, batch: LocalBatch) -> torch.Tensor:
        tempered = Logits(lambda rows: self.tempered(head(rows)), head.linear)
        return self.of_tokens(in_chunks(hidden, tempered, batch.targets), batch)

    def tempered(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.temperature == 1 else logits / self.temperature

    def sums_of(self, values: torch.Tensor, sample_of_value: torch.Tensor, num_samples: int) -> torch.Tensor:
        """Sum `values [K, N]` by sample over the ranks of the sequence-parallel group. Returns `[K, samples]`.

        Collective: all ranks of the group must call it. Gradients reach only the values of this rank. The sums are
        computed in fp64, because they have many summands and losses depend on their differences.
        """
        values = values.double()
        own = values.new_zeros(len(values), num_samples).index_add(1, sample_of_value, values)
        return self.add_up(own.detach().clone()) + (own - own.detach())


def in_chunks(hidden: torch.Tensor, head: Logits, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of `targets [N]`, one chunk of logits at a time. Backward recomputes the logits."""
    rows = ROWS if head.linear is None else max(1, CHUNK // len(head.linear.weight))
    return by_rows(lambda some, wanted: log_probabilities(head(some), wanted), hidden, targets, rows)


class ResponseLoss(LogProbabilityLoss):
    """Base class of losses on the log-probabilities of complete responses, which are sums over their tokens."""

    def of_tokens(self, each: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the sum of the loss, given the log-probabilities `each` of this rank's targets, `[targets]`.

        Each rank of a sequence-parallel group returns an equal share of the loss of their responses.
        """
        scores, samples = gather_scores(each, batch)
        if batch.preferences is None:
            self.metric_sums = {name: each.new_zeros(()) for name in self.metrics}
            return 0 * scores.sum().to(each.dtype)
        total, metric_sums = self.of_sums(self.sums_of(scores, samples, batch.num_samples), batch)
        self.metric_sums = {name: value.detach().to(each.dtype) / self.sharing for name, value in metric_sums.items()}
        # The value is an equal share of the total. The gradient is not divided: it has only this rank's tokens.
        return total.detach().to(each.dtype) / self.sharing + (total - total.detach()).to(each.dtype)

    def of_sums(self, sums: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its metrics, summed over complete responses.

        Args:
            sums: Log-probabilities of the samples and their lengths, `[2, samples]`, float64.
            batch: This rank's part of the micro-batch.
        """
        raise NotImplementedError


def gather_scores(each: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of all targets of this rank, those of text and those of decoders.

    Args:
        each: Log-probabilities of the text targets.
        batch: Contains the likelihoods that decoders reported.

    Returns:
        Log-probabilities and the number of values that each of them covers, `[2, N]`, float64; and the number of the
        sample of each, `[N]`.
    """
    values = [torch.stack([each.double(), torch.ones_like(each, dtype=torch.float64)])]
    samples = [batch.sample_of_target]
    for _, likely in sorted(batch.likely.items()):
        values.append(torch.stack([likely.log_likelihood.double(), likely.values.double()]))
        samples.append(batch.columns["sample_of_token"][likely.index])
    return torch.cat(values, 1), torch.cat(samples)
