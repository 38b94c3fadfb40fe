"""Losses on the log-probabilities of single tokens or of complete responses.

With sequence parallelism, several ranks have tokens of the same response. Each rank sums the values of its tokens, and
an all-reduce adds these sums, one number per response. Losses and gradients therefore match a run in one process.
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

    def loss_of_tokens(self, scores: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the summed loss, given the log-probabilities `scores [targets]` of this rank's targets."""
        raise NotImplementedError

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.num_sharing = mesh.layout.sp  # ranks that have tokens of the same responses
        self.sum_over_sp = partial(mesh.sum_along, "sp")

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        scores = log_probabilities(self.scale_logits(logits), batch.targets)
        return self.loss_of_tokens(scores, batch)

    def from_hidden(self, hidden: torch.Tensor, head: Logits, batch: LocalBatch) -> torch.Tensor:
        scaled_head = Logits(lambda rows: self.scale_logits(head(rows)), head.linear)
        scores = score_in_chunks(hidden, scaled_head, batch.targets)
        return self.loss_of_tokens(scores, batch)

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits divided by the temperature."""
        return logits if self.temperature == 1 else logits / self.temperature

    def sum_by_sample(self, values: torch.Tensor, sample_of_value: torch.Tensor, num_samples: int) -> torch.Tensor:
        """Sum values by sample, over all ranks of the sequence-parallel group.

        `values [kinds, N]` has N values of each kind on this rank, and `sample_of_value [N]` their sample numbers. The
        sums are `[kinds, samples]`.

        Collective: all ranks of the group must call it. Gradients reach only the values of this rank. The sums are
        computed in fp64, because they have many summands and losses depend on their differences.
        """
        values = values.double()
        local_sums = values.new_zeros(len(values), num_samples).index_add(1, sample_of_value, values)
        return self.sum_over_sp(local_sums.detach().clone()) + (local_sums - local_sums.detach())


def score_in_chunks(hidden: torch.Tensor, head: Logits, targets: torch.Tensor) -> torch.Tensor:
    """Compute log-probabilities of `targets [N]`, one chunk of logits at a time. Backward recomputes the logits."""
    chunk_rows = ROWS
    if head.linear is not None:
        chunk_rows = max(1, CHUNK // len(head.linear.weight))

    def score(hidden_rows: torch.Tensor, row_targets: torch.Tensor) -> torch.Tensor:
        return log_probabilities(head(hidden_rows), row_targets)

    return by_rows(score, hidden, targets, chunk_rows)


class ResponseLoss(LogProbabilityLoss):
    """Base class of losses on the log-probabilities of complete responses. These are sums over tokens."""

    def loss_of_tokens(self, scores: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Return the sum of the loss, given the log-probabilities `scores` of this rank's text targets, `[targets]`.

        The ranks of a sequence-parallel group share their responses. Each rank returns an equal share of the loss.
        """
        dtype = scores.dtype
        all_scores, samples = gather_scores(scores, batch)
        if batch.preferences is None:
            self.metric_sums = {name: scores.new_zeros(()) for name in self.metrics}
            result = 0 * all_scores.sum().to(dtype)
            batch.source_sums.add(result, result.new_zeros(0), samples[:0])
            return result

        sums = self.sum_by_sample(all_scores, samples, batch.num_samples)
        total, metric_sums = self.loss_of_sums(sums, batch)
        split = batch.source_sums.pop(total)
        self.metric_sums = {}
        for name, value in metric_sums.items():
            self.metric_sums[name] = value.detach().to(dtype) / self.num_sharing
        # The value is an equal share of the total. The gradient is not divided, because it covers only this rank's
        # tokens.
        share = total.detach().to(dtype) / self.num_sharing
        result = share + (total - total.detach()).to(dtype)
        batch.source_sums.put(result, None if split is None else split / self.num_sharing)
        return result

    def loss_of_sums(self, sums: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and its metrics, summed over complete responses.

        Args:
            sums: Log-probabilities of the samples and their lengths, `[2, samples]`, float64.
            batch: This rank's part of the micro-batch.
        """
        raise NotImplementedError


def gather_scores(text_scores: torch.Tensor, batch: LocalBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of all targets on this rank, both text targets and decoder targets.

    Args:
        text_scores: Log-probabilities of the text targets.
        batch: Contains the likelihoods that decoders reported.

    Returns:
        For N targets: their log-probabilities and the number of values in each target, `[2, N]`, float64; and the
        sample number of each target, `[N]`.
    """
    ones = torch.ones_like(text_scores, dtype=torch.float64)
    scores = [torch.stack([text_scores.double(), ones])]
    samples = [batch.sample_of_target]
    for _, likelihood in sorted(batch.likely.items()):
        scores.append(torch.stack([likelihood.log_likelihood.double(), likelihood.values.double()]))
        samples.append(batch.columns["sample_of_token"][likelihood.index])
    return torch.cat(scores, 1), torch.cat(samples)
