"""Losses as users write them: some right, some wrong, named by import path in tests."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omnizoo import Loss


class Chunked(Loss):
    """Cross entropy by hidden states and the head, a few rows at a time, whose logits are made again in backward."""

    def __init__(self, rows=7):
        self.rows = rows

    def from_hidden(self, hidden, head, batch):
        def each(rows, targets):
            return F.cross_entropy(head(rows).float(), targets, reduction="none")

        pieces = zip(hidden.split(self.rows), batch.targets.split(self.rows), strict=True)
        return batch.sum(torch.cat([checkpoint(each, *piece, use_reentrant=False) for piece in pieces]))


class Norm(Loss):
    """Of the logits; on a rank without targets, a number that has nothing to do with the model."""

    def from_logits(self, logits, batch):
        return batch.sum(logits.float().square().sum(1)) if len(logits) else torch.zeros(())


class Unsplit(Loss):
    """A loss on logits that does not use `batch.sum`."""

    def from_logits(self, logits, batch):
        return logits.float().square().sum()


class ByRarity(Loss):
    """Cross entropy by a column that a test adds; its metrics are by the weights of rows, and without any."""

    metrics = ("by_weight", "plain")

    def from_logits(self, logits, batch):
        each = F.cross_entropy(logits.float(), batch.targets, reduction="none")
        self.metric_sums = {"by_weight": batch.sum(each), "plain": each.sum()}
        return (each * batch.columns["rarity"]).sum()


class Experts(Loss):
    """Of routers: the entropy of each token's choice."""

    def count(self, totals):
        return totals.tokens

    def from_routers(self, records, batch):
        return sum(torch.special.entr(record.logits.float().softmax(1)).sum() for record in records)


class NotALoss:
    def from_logits(self, logits, batch):
        return logits.sum()


class SeesNothing(Loss):
    pass


class SeesTwice(Chunked):
    def from_logits(self, logits, batch):
        return logits.sum()


class NoBatch(Loss):
    def from_logits(self, logits):
        return logits.sum()


class NeedsMore(Norm):
    def __init__(self, teacher):
        self.teacher = teacher


class Refuses(Norm):
    def __init__(self, rate=1.0):
        raise ValueError(f"rate is {rate}; I want another")


class NoTotals(Norm):
    def count(self):
        return 1


class CountedInForward(Norm):
    def count(self, totals):
        return self.seen

    def from_logits(self, logits, batch):
        self.seen = len(logits)
        return logits.sum()


class CountsTensors(Norm):
    def count(self, totals):
        return torch.tensor(3)


class CountsDown(Norm):
    def count(self, totals):
        return -1


class CountsNothing(Norm):
    def count(self, totals):
        return None


class NotANumber(Norm):
    def count(self, totals):
        return float("nan")


class PerToken(Loss):
    def from_logits(self, logits, batch):
        return logits.sum(1)


class PlainNumber(Loss):
    def from_logits(self, logits, batch):
        return logits.sum().item()
