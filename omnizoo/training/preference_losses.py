"""Losses of preference pairs: DPO and its kin, on how likely two answers to one prompt are.

Ranks may share the tokens of a pair. Each adds up its own log-probabilities; their sums, one number per answer, are
added up over these ranks, so that loss and gradients are those of one process.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from omnizoo.assembly.parallelize import parallelize
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config, Model, Optimizer
from omnizoo.data.plan import Totals
from omnizoo.models.adapter import attached, switched_off
from omnizoo.models.build import build_model
from omnizoo.models.head import Head, Logits, OddHeadError
from omnizoo.ops.linear_cross_entropy import CHUNK
from omnizoo.ops.precision import exact
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.built_in_losses import AtHead
from omnizoo.training.forward import Local, forward

ROWS = 256  # through a head of unknown size at a time


class Preference(AtHead):
    """A loss of pairs; a mean over them. What answers are compared by is their log-probability, over `length` if the
    loss says so; `beta` times that is an answer's reward."""

    metrics: ClassVar[Sequence[str]] = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
    is_normalised = True

    def __init__(self, beta: float, chunked: bool | None = None) -> None:
        super().__init__(chunked)
        self.beta = beta

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The loss of each pair `[P]`, by the log-probabilities of its answers `[P]`."""
        raise NotImplementedError

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.sharing, self.add_up = mesh.layout.sp, partial(mesh.sum_along, "sp")
        self.precision = config.parallel.precision

    def count(self, totals: Totals) -> float:
        return totals.pairs

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        return self.of_tokens(log_probabilities(logits, batch.targets), batch)

    def of_hidden(self, hidden: torch.Tensor, head: Logits, batch: Local) -> torch.Tensor:
        return self.of_tokens(in_chunks(hidden, head, batch.targets, self.precision), batch)

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        """By the log-probability `each [N]` of this rank's targets. Ranks that share pairs return equal shares."""
        pairs = batch.pairs
        if pairs is None:
            self.measured = {name: each.new_zeros(()) for name in self.metrics}
            return 0 * each.sum()
        # In fp64: long sums, of which differences are taken.
        own = each.new_zeros(2, pairs.samples, dtype=torch.float64)
        values = torch.stack([each.double(), torch.ones_like(each, dtype=torch.float64)])
        own = own.index_add(1, pairs.sample_of_target, values)
        # The value is that of all ranks, the gradient goes to this rank's own tokens.
        sums = self.add_up(own.detach().clone()) + (own - own.detach())
        answers = sums[0] / sums[1].clamp(min=1) if self.is_normalised else sums[0]
        chosen, rejected = answers[pairs.chosen], answers[pairs.chosen + 1]
        total = self.of_pairs(chosen, rejected).sum()
        good, bad = self.beta * chosen.detach(), self.beta * rejected.detach()
        measured = (good.sum(), bad.sum(), (good - bad).sum(), (good > bad).double().sum())
        shares = [value.to(each.dtype) / self.sharing for value in (total.detach(), *measured)]
        self.measured = dict(zip(self.metrics, shares[1:], strict=True))
        return shares[0] + (total - total.detach()).to(each.dtype)


class DPO(Preference):
    """Direct preference optimisation (Rafailov et al., 2023): by how much more likely an answer is than to a reference.

    `loss`: `sigmoid`, with `label_smoothing` as in conservative DPO; `ipo` (Azar et al., 2023), of means over tokens
    unless `length_normalised` is false; or `hinge` (Zhao et al., 2023). The reference is the folder of that name;
    without one, the base of the adapter, or a frozen copy of the model as it is before the first step.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalised: bool | None = None,
        reference: str | None = None,
        chunked: bool | None = None,
    ) -> None:
        super().__init__(beta, chunked)
        if label_smoothing and loss != "sigmoid":
            raise UserError(f"label_smoothing: {label_smoothing:g} is for the loss sigmoid, not for {loss}")
        self.loss, self.label_smoothing, self.folder = loss, label_smoothing, reference
        self.is_normalised = loss == "ipo" if length_normalised is None else length_normalised

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.model, adapter = model, attached(model)
        self.reference = model
        if adapter is None or adapter.saved or self.folder is not None:
            self.reference = self._copy(mesh, config)
        self.head: Head | None = None
        if self.view == "of_hidden":
            self.head = Head(self.reference, "train.losses: dpo")

    def _copy(self, mesh: Mesh, config: Config) -> nn.Module:
        if self.folder is None and config.checkpoint.resume.startswith("weights:"):
            raise UserError(
                f"checkpoint.resume: {config.checkpoint.resume}: the reference of dpo is not clear then; export that "
                "checkpoint, and name the folder in the option `reference` of dpo"
            )
        spec = config.model.model_copy(update={"adapter": None})
        if self.folder is not None:
            spec = Model(path=self.folder, attention=config.model.attention)
        config = config.model_copy(update={"model": spec, "optimizer": Optimizer()})
        copy = build_model(spec, config.parallel.precision).requires_grad_(False)
        own, other = (vocabulary(each) for each in (self.model, copy))
        if own != other:
            raise UserError(f"train.losses: the reference {self.folder} has {other} tokens, and the model {own}")
        parallelize(copy, mesh, config)
        return copy.eval()

    @torch.no_grad()
    def prepare(self, batch: Local) -> None:
        """What the reference gives, before the model itself runs: they may be one."""
        if self.reference is not self.model:
            self.of_reference = self._ask(batch)
            return
        is_training = self.model.training
        self.model.eval()  # no dropout
        with switched_off(self.model):
            self.of_reference = self._ask(batch)
        self.model.train(is_training)

    def _ask(self, batch: Local) -> torch.Tensor:
        """The reference's log-probability of each target `[N]`."""
        if self.head is None:
            return log_probabilities(forward(self.reference, batch)[0], batch.targets)
        found: list[torch.Tensor] = []

        def work(hidden: torch.Tensor, head: Logits) -> None:
            found.append(in_chunks(hidden, head, batch.targets, self.precision))

        with self.head.doing(work) as anchor:
            logits, _ = forward(self.reference, batch)
        try:
            anchor(logits)
        except OddHeadError:  # in the first forward pass of a run
            if self.chunked:
                raise
            self.head = None
            return self._ask(batch)
        return found[0]

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        return super().of_tokens(each - self.of_reference, batch)

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        apart = chosen - rejected
        if self.loss == "ipo":
            return (apart - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return F.relu(1 - self.beta * apart)
        return unlikeliness(self.beta * apart, self.label_smoothing)


class SimPO(Preference):
    """Simple preference optimisation (Meng et al., 2024): without a reference, by means over tokens; the reward of the
    chosen answer shall be `gamma` above the other's."""

    def __init__(
        self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, chunked: bool | None = None
    ) -> None:
        super().__init__(beta, chunked)
        self.gamma, self.label_smoothing = gamma, label_smoothing

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return unlikeliness(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)


class ORPO(Preference):
    """Odds ratio preference optimisation (Hong et al., 2024): the chosen answer is learnt, and `beta` times the
    log-odds ratio of both added; without a reference, by means over tokens."""

    def __init__(self, beta: float = 0.1, chunked: bool | None = None) -> None:
        super().__init__(beta, chunked)

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        log_odds = [answer - torch.log(-torch.expm1(answer)) for answer in (chosen, rejected)]
        return -chosen + self.beta * unlikeliness(log_odds[0] - log_odds[1])


def unlikeliness(apart: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Of the preference that was given, where such a share of them is wrong."""
    return -(1 - label_smoothing) * F.logsigmoid(apart) - label_smoothing * F.logsigmoid(-apart)


def vocabulary(model: nn.Module) -> int | None:
    """How many tokens the model knows; None if it does not tell."""
    return getattr(model.config.get_text_config(), "vocab_size", None) if isinstance(model, PreTrainedModel) else None


def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of `targets [N]` by `logits [N, V]`, in fp32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(wide, targets, reduction="none")


def in_chunks(hidden: torch.Tensor, head: Logits, targets: torch.Tensor, precision: str) -> torch.Tensor:
    """Log-probabilities of `targets [N]`, with few logits at a time; in backward, they are made again."""
    rows = ROWS if head.linear is None else max(1, CHUNK // len(head.linear.weight))

    def each(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return log_probabilities(head(some), wanted)

    run: Callable[..., torch.Tensor] = each
    if torch.is_grad_enabled():
        # Autograd leaves the mode that the forward pass ran under.
        run = partial(checkpoint, each, use_reentrant=False, context_fn=lambda: (nullcontext(), exact(precision)))
    pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([run(*piece) for piece in pieces])
