"""Losses of preference pairs: DPO and its kin, on how likely two answers to one prompt are.

The answers of a pair share a pack, and ranks may share both (training/likelihood.py).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.parallelize import parallelize
from omnizoo.assembly.published import media_model
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.config.train_section import Optimizer
from omnizoo.data.plan import Totals
from omnizoo.models.adapter import attached, switched_off
from omnizoo.models.base_identity import base_identity
from omnizoo.models.build import build_model
from omnizoo.models.head import Head, Logits, OddHeadError
from omnizoo.ops.log_probability import log_probabilities
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local, LocalAnswers, forward
from omnizoo.training.likelihood import OfLogProbabilities, in_chunks
from omnizoo.training.loss_contract import Upcoming
from omnizoo.training.reference_cache import ReferenceCache


class OfAnswers(OfLogProbabilities):
    """A loss of whole answers, by their log-probabilities: sums over tokens, which ranks may share."""

    def of_tokens(self, each: torch.Tensor, batch: Local) -> torch.Tensor:
        """By the log-probability `each [N]` of this rank's targets. Ranks that share answers return equal shares."""
        scored = all_of(each, batch)
        if batch.answers is None:
            self.measured = {name: each.new_zeros(()) for name in self.metrics}
            return 0 * scored.values.sum().to(each.dtype)
        total, measured = self.of_sums(self.sums_of(scored.values, scored), batch.answers)
        self.measured = {name: value.detach().to(each.dtype) / self.sharing for name, value in measured.items()}
        # The value is shared among ranks, the gradient is that of each rank's own tokens.
        return total.detach().to(each.dtype) / self.sharing + (total - total.detach()).to(each.dtype)

    def of_sums(self, sums: torch.Tensor, answers: LocalAnswers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and its metrics, of whole answers: `sums[0]` are their log-probabilities, `sums[1]` their
        lengths."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scored:
    """All that answers are made of on this rank: targets of the text, and those of decoders."""

    values: torch.Tensor  # [2, N]: log-probabilities, and next to them how many values each is of; float64
    samples: int  # of the micro-batch
    sample_of_target: torch.Tensor  # [N]


def all_of(each: torch.Tensor, batch: Local) -> Scored:
    """By the log-probability `each [M]` of this rank's targets of the text, and what decoders told."""
    told, answers = [batch.likely[name] for name in sorted(batch.likely)], batch.answers
    values = [torch.stack([each.double(), torch.ones_like(each, dtype=torch.float64)])]
    values += [torch.stack([likely.log_likelihood.double(), likely.values.double()]) for likely in told]
    if answers is None:
        return Scored(torch.cat(values, 1), 0, each.new_empty(0, dtype=torch.int64))
    samples = [answers.sample_of_target]
    if told:
        assert answers.sample_of_token is not None
        samples += [answers.sample_of_token[likely.index] for likely in told]
    return Scored(torch.cat(values, 1), answers.samples, torch.cat(samples))


class Preference(OfAnswers):
    """A loss of pairs; a mean over them. What answers are compared by is their log-probability, over `length` if the
    loss says so; `beta` times that is an answer's reward."""

    metrics: ClassVar[Sequence[str]] = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
    is_normalised = True
    of_reference: torch.Tensor | None = None  # [samples] what is taken from their log-probabilities

    def __init__(self, beta: float, chunked: bool | None = None) -> None:
        super().__init__(chunked)
        self.beta = beta

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The loss of each pair `[P]`, by the log-probabilities of its answers `[P]`."""
        raise NotImplementedError

    def count(self, totals: Totals) -> float:
        return totals.pairs

    def of_sums(self, sums: torch.Tensor, answers: LocalAnswers) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        each = sums[0] if self.of_reference is None else sums[0] - self.of_reference
        each = each / sums[1].clamp(min=1) if self.is_normalised else each
        chosen, rejected = each[answers.of_role["chosen"]], each[answers.of_role["chosen"] + 1]
        good, bad = self.beta * chosen, self.beta * rejected
        measured = (good.sum(), bad.sum(), (good - bad).sum(), (good > bad).double().sum())
        return self.of_pairs(chosen, rejected).sum(), dict(zip(self.metrics, measured, strict=True))


class DPO(Preference):
    """Direct preference optimisation (Rafailov et al., 2023): by how much more likely an answer is than to a reference.

    `loss`: `sigmoid`, with `label_smoothing` as in conservative DPO; `ipo` (Azar et al., 2023), of means over tokens
    unless `length_normalised` is false; or `hinge` (Zhao et al., 2023). For `reference`, see `Reference`.
    """

    def __init__(
        self,
        beta: float = 0.1,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalised: bool | None = None,
        reference: str | None = None,
        reference_cache: str | None = None,
        chunked: bool | None = None,
    ) -> None:
        super().__init__(beta, chunked)
        if label_smoothing and loss != "sigmoid":
            raise UserError(f"label_smoothing: {label_smoothing:g} is for the loss sigmoid, not for {loss}")
        self.loss, self.label_smoothing, self.folders = loss, label_smoothing, (reference, reference_cache)
        self.is_normalised = loss == "ipo" if length_normalised is None else length_normalised

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        super().set_up(model, mesh, config)
        self.reference = Reference(self, "dpo", *self.folders, model, mesh, config)

    def begin_step(self, step: Upcoming) -> None:
        self.reference.begin_step(step)

    def prepare(self, batch: Local) -> None:
        self.of_reference = self.reference.sums(batch)

    def of_pairs(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        apart = chosen - rejected
        if self.loss == "ipo":
            return (apart - 1 / (2 * self.beta)).square()
        if self.loss == "hinge":
            return F.relu(1 - self.beta * apart)
        return unlikeliness(self.beta * apart, self.label_smoothing)


class Asked:
    """A model that is asked how likely it finds targets, without gradients and dropout. `loss` is who asks."""

    def __init__(self, model: nn.Module, loss: OfAnswers, key: str) -> None:
        self.model, self.loss = model, loss
        self.head = Head(model, key) if loss.view == "of_hidden" else None

    @torch.no_grad()
    def sums(self, batch: Local) -> torch.Tensor:
        """The log-probabilities of whole answers `[samples]`, in fp64. All ranks must call, also those without any."""
        is_training = self.model.training
        self.model.eval()
        each = self._each(batch)
        self.model.train(is_training)
        if batch.answers is None:
            return each.new_zeros(0, dtype=torch.float64)
        scored = all_of(each, batch)
        return self.loss.sums_of(scored.values[:1], scored)[0]

    def _each(self, batch: Local) -> torch.Tensor:
        if self.head is None:
            return log_probabilities(forward(self.model, batch)[0], batch.targets)
        found: list[torch.Tensor] = []

        def work(hidden: torch.Tensor, head: Logits) -> None:
            found.append(in_chunks(hidden, head, batch.targets))

        with self.head.doing(work) as anchor:
            logits, _ = forward(self.model, batch)
        try:
            anchor(logits)
        except OddHeadError:  # in the first forward pass of a run
            if self.loss.chunked:
                raise
            self.head = None
            return self._each(batch)
        return found[0]


class Reference:
    """What a loss compares its model with: the folder of that name; without one, the base of the adapter, or a frozen
    copy of the model as it is before the first step. `kind` is that of the loss.

    With a folder `cache`, what it gives is kept there, and it is made only once there is something new to ask it.
    """

    def __init__(
        self,
        loss: OfAnswers,
        kind: str,
        folder: str | None,
        cache: str | None,
        model: nn.Module,
        mesh: Mesh,
        config: Config,
    ) -> None:
        self.loss, self.kind, self.folder, self.policy, self.mesh = loss, kind, folder, model, mesh
        adapter = attached(model)
        self.is_base = adapter is not None and not adapter.saved and folder is None
        self.config, self.is_known = self._of_reference(config), False
        self.cache: ReferenceCache | None = None
        if cache is not None:
            identity = agree(mesh, lambda: base_identity(self.config) if mesh.is_first else "")
            # A base that is held in few bits gives other values.
            held = config.model.adapter.base if self.is_base and config.model.adapter else None
            name = "-".join(filter(None, (mesh.from_first(identity), config.parallel.precision, held)))
            key = f"train.losses: {kind}: reference_cache"
            self.cache = agree(mesh, lambda: ReferenceCache(cache, name, mesh.sp_rank == 0, key))
        if self.cache is None:
            _ = self.asked

    @cached_property
    def asked(self) -> Asked:
        """The reference itself. Made before a step begins, whose random numbers must not depend on it."""
        return self._build()

    def begin_step(self, step: Upcoming) -> None:
        """Whether all of a step is known is the same on all ranks, which share their models."""
        if self.cache is None:
            return
        others = step.mismatched.batches if step.mismatched else []
        misses = sum(self.cache.misses(batch.keys) for batch in (*step.batches, *others))
        self.is_known = not self.mesh.sum([misses])[0]
        if not self.is_known:
            _ = self.asked

    def sums(self, batch: Local) -> torch.Tensor:
        """Its log-probabilities of whole answers `[samples]`. Before the model itself runs: they may be one."""
        answers = batch.answers
        if self.cache is not None and self.is_known:
            found = [] if answers is None else self.cache.find(answers.keys)
            return torch.tensor(found, dtype=torch.float64, device=self.mesh.device)
        with switched_off(self.policy) if self.is_base else nullcontext():
            sums = self.asked.sums(batch)
        if self.cache is not None and answers is not None:
            self.cache.add(answers.keys, sums.tolist())
        return sums

    def _of_reference(self, config: Config) -> Config:
        """The run's config, with the reference in place of its model."""
        if not self.is_base and self.folder is None and config.checkpoint.resume.startswith("weights:"):
            raise UserError(
                f"checkpoint.resume: {config.checkpoint.resume}: the reference of {self.kind} is not clear then; "
                f"export that checkpoint, and name the folder in the option `reference` of {self.kind}"
            )
        spec = config.model.model_copy(update={"adapter": None})
        if self.folder is not None:
            spec = Model(path=self.folder, attention=config.model.attention)
        return config.model_copy(update={"model": spec, "optimizer": Optimizer()})

    def _build(self) -> Asked:
        model = self.policy if self.is_base else self._copy()
        return Asked(model, self.loss, f"train.losses: {self.kind}")

    def _copy(self) -> nn.Module:
        copy = build_model(self.config.model, self.config.parallel.precision).requires_grad_(False)
        own, other = (vocabulary(each) for each in (self.policy, copy))
        if own != other:
            raise UserError(f"train.losses: the reference {self.folder} has {other} tokens, and the model {own}")
        has = [", ".join(map(str, media_model(each).ports)) or "no media" for each in (self.policy, copy)]
        if has[0] != has[1]:
            raise UserError(f"train.losses: the reference {self.folder} has {has[1]}, and the model {has[0]}")
        parallelize(copy, self.mesh, self.config)
        return copy.eval()


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
