"""Training engine for reinforcement learning frameworks, on any layout (docs/how-to/rl.md).

It computes log-probabilities of rollouts, runs policy-gradient steps, and streams the weights to the rollout engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.step_data import StepData
from omnizoo.checkpoint.resume import find_checkpoint
from omnizoo.checkpoint.save import save_checkpoint
from omnizoo.checkpoint.weight_stream import stream_adapter, stream_weights
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.loading.lane_stream import LoadedStep
from omnizoo.data.loading.prepare import prepare_pack
from omnizoo.data.sample import Sample
from omnizoo.models.adapters.lora import adapter_disabled
from omnizoo.models.check_config_fields import vocabulary_size
from omnizoo.models.hf_private import PublishedKeys
from omnizoo.ops.precision import keep_precision
from omnizoo.parallel.errors import first_different_rank, sync_errors
from omnizoo.parallel.fsdp.shard import release
from omnizoo.parallel.mesh import Mesh
from omnizoo.rl.rollouts import Rollout, RolloutReader, RolloutRows, digest, pack_all
from omnizoo.training.losses.base import NamedLoss, build_losses, name_loss
from omnizoo.training.losses.policy import LogProbabilityRecorder, Policy
from omnizoo.training.losses.preference import DPO
from omnizoo.training.losses.text import HeadLoss
from omnizoo.training.objective import LanguageObjective, build_objective
from omnizoo.training.preflight import check_plugins, check_same_model
from omnizoo.training.recompute_budget import apply_recompute_budget, saved_choice
from omnizoo.training.setup import build_bundle, joined_world, set_up_training
from omnizoo.training.step import train_step


@dataclass(frozen=True)
class Scorer:
    """Computes log-probabilities of rollouts with a model."""

    objective: LanguageObjective
    balancer: Balancer
    recorder: LogProbabilityRecorder


class Engine:
    """A model with its optimizer and losses on a mesh.

    Collective: all ranks must call every method with the same arguments. Results are the same on all ranks, except for
    the results of `weights`.

    Attributes:
        model: The sharded model.
        tokenizer: The tokenizer of the model.
        steps: Number of optimizer steps so far, including steps before a resume.
        bad_steps: Number of steps that were skipped because the loss or a gradient was not finite.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Build the engine, and resume from the newest checkpoint of the run if there is one, as `omnizoo train` does.

        Args:
            config: The config of the run. `train.losses` must not contain losses for preference pairs.
            mesh: The mesh to train on.

        Raises:
            UserError: If the config sets `train.epochs`, or losses that do not support rollouts.
        """
        self.config = config
        self.mesh = mesh
        self.directory = Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints")
        check_plugins(config, reads_rows=False)
        if config.train.epochs is not None:
            raise UserError(
                f"train.epochs: {config.train.epochs} is not supported. omnizoo.Engine reads no rows, so it cannot "
                "count epochs. Set train.steps instead."
            )
        losses = build_losses(config)
        self._temperature = temperature_of(losses)
        if config.preference_pairs != "refused":
            raise UserError("train.losses: a loss on preferences cannot be computed on rollouts. Use grpo or gspo.")
        bundle = sync_errors(mesh, lambda: build_bundle(config))
        check_same_model(config, mesh)
        self.model: nn.Module = bundle.model
        self.tokenizer: Any = bundle.tokenizer
        self._reader = sync_errors(mesh, lambda: bundle.reader([RolloutRows()]))
        self._keys = PublishedKeys(self.model)
        start = find_checkpoint(config, self.directory, mesh)
        self._setup = set_up_training(bundle, mesh, start, losses=losses)
        self._setup.objective.source_names = ()  # rollouts come from no source
        self.steps: int = self._setup.saved.get("step", 0)
        self.bad_steps: int = self._setup.saved.get("bad_steps", 0)
        self._rollouts = RolloutReader(self._reader.text_renderer, config.data.pack_tokens, vocabulary_size(self.model))
        self._required_columns = sorted({name for loss in losses for name in loss.loss.required_columns})
        self._is_budget_applied = False  # the recompute budget is applied when the first rollouts are known
        self._scorers: dict[bool, Scorer] = {}  # key: whether the model is the reference model

    @classmethod
    @contextmanager
    def start(
        cls,
        config: str | Path | Mapping[str, Any] | Config,
        overrides: Sequence[str] = (),
        *,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Iterator["Engine"]:
        """Context manager: join the process group, build the mesh and the engine, and leave the group on exit.

        Args:
            config: Path of a config file, its content as a mapping, or a `Config`.
            overrides: Command line arguments that change the config: `["--train.lr", "1e-3"]`.
            model: A model object to train instead of the model in the config.
            tokenizer: The tokenizer of `model`.

        Yields:
            The engine, in a single process or in the processes that torchrun started.

        Raises:
            UserError: If the config or the model cannot be used.

        Example:
            >>> with omnizoo.Engine.start("grpo.yaml") as engine:
            ...     metrics = engine.step(rollouts)
        """
        objects = {"model": model, "tokenizer": tokenizer}
        loaded_config = load_config(config, overrides, objects=objects, needs_data=False)
        with joined_world(loaded_config, has_loader=False) as (run_config, mesh):
            yield cls(run_config, mesh)

    @torch.no_grad()
    def log_probabilities(self, rollouts: Sequence[Rollout], reference: bool = False) -> list[torch.Tensor]:
        """Return the log-probabilities of the response tokens, without dropout, at the `temperature` of the losses.

        Args:
            rollouts: The rollouts; the same list on all ranks.
            reference: Use the reference model instead of the current one. The reference model is the model before its
                first step: the base model of the adapter, or a frozen copy that is built on first use.

        Returns:
            For each rollout, a tensor `[tokens]` on the host, with one value per token of the response.

        Raises:
            UserError: If a rollout is invalid, or ranks have different rollouts.
        """
        samples = self._same_samples(lambda: self._rollouts.to_score(rollouts, LogProbabilityRecorder.PLACE))
        scorer = self._scorer(reference)
        data = self._redistribute(samples, scorer.balancer)
        precision = self.config.train.precision
        lengths = [int(sample.is_target.sum()) for sample in samples]
        dtype = torch.float64 if precision == "fp64" else torch.float32
        scorer.recorder.values = torch.zeros(sum(lengths), dtype=dtype, device=self.mesh.device)

        objective = scorer.objective
        model = objective.model
        model.eval()
        with adapter_disabled(model) if reference and model is self.model else nullcontext():
            for batch in data.micro_batches:
                with keep_precision(precision):
                    objective.terms(batch)
        objective.router_stats.reset()
        release(model)
        self.model.train()
        # One rank processes each token. The other ranks have 0 at its position.
        return list(self.mesh.total(scorer.recorder.values).cpu().split(lengths))

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Run one optimizer step on all `rollouts` together, with the losses of the config (`grpo`, `gspo`, ...).

        If the loss or the gradient norm is not finite, the weights stay unchanged and `bad_steps` increases.

        Args:
            rollouts: The rollouts, with all fields that the losses need; the same list on all ranks.

        Returns:
            The metrics of the step, under the names that `omnizoo train` logs.

        Raises:
            UserError: If a rollout is invalid or lacks a field, or ranks have different rollouts.
        """
        samples = self._same_samples(lambda: self._rollouts.to_train(rollouts, self._required_columns))
        setup = self._setup
        assert setup.optimizer is not None
        data = self._redistribute(samples, setup.balancer)
        if not self._is_budget_applied:
            apply_recompute_budget(setup.objective, data, setup.saved.get("recompute"))
            self._is_budget_applied = True
        self.steps += 1
        result = train_step(setup.objective, setup.optimizer, data, self.steps)
        self.bad_steps += not result.finite
        return result.metrics() | {"tokens": data.tokens, "bad_steps": self.bad_steps}

    def weights(
        self, dtype: torch.dtype | None = None, everywhere: bool = False, adapter_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights as full tensors, one at a time. Collective: all ranks must iterate to the end.

        Args:
            dtype: Dtype of the tensors. Default: the dtype in which the engine stores the weights.
            everywhere: Yield the tensors on all ranks instead of rank 0 only.
            adapter_only: Yield only the adapter, under PEFT's names. Otherwise the adapter is merged into the weights.

        Returns:
            An iterator over (name, full tensor), with the names and shapes of the published weight files.

        Raises:
            UserError: If the base model is quantized, unless `adapter_only` is set, or if `adapter_only` is set and the
                model has no adapter.
        """
        is_kept = everywhere or self.mesh.is_first
        if adapter_only:
            return stream_adapter(self.model, dtype, is_kept)
        adapter = self.config.model.adapter
        if adapter is not None and adapter.base is not None:
            raise UserError(
                f"weights: the base is quantized (model.adapter.base: {adapter.base}), so its original weights are not "
                "available. Use adapter_only=True, and load the base in the rollout engine from its folder."
            )
        return stream_weights(self.model, self._keys, dtype, is_kept)

    def save(self) -> Path:
        """Write a checkpoint and return its path.

        The next engine with this config resumes from the checkpoint, and `omnizoo export` accepts it.
        """
        state = self._setup.identity() | {"bad_steps": self.bad_steps, "loader": None}
        state |= saved_choice(self.model, self.config, self.mesh)
        optimizer = self._setup.optimizer
        assert optimizer is not None
        return save_checkpoint(
            self.directory, self.steps, self.model, optimizer, state, self.mesh, self.config, self.tokenizer
        )

    def _same_samples(self, read: Callable[[], list[Sample]]) -> list[Sample]:
        """Convert rollouts to samples, and check that all ranks have the same samples.

        Collective: all ranks must call it.
        """
        samples = sync_errors(self.mesh, read)
        if self.mesh.layout.world > 1:
            rank = first_different_rank(self.mesh, digest(samples))
            if rank is not None:
                raise UserError(
                    f"rollouts: rank {rank} has different rollouts than rank 0. Pass the same list on all ranks."
                )
        return samples

    def _redistribute(self, samples: Sequence[Sample], balancer: Balancer) -> StepData:
        """Pack the samples and redistribute the packs. As in training, each rank prepares some of the packs.

        Collective: all ranks must call it.
        """
        mesh = self.mesh
        packs = []
        bad_media: list[str] = []
        for index, pack_samples in enumerate(pack_all(samples, self.config.data.pack_tokens)):
            if index % mesh.layout.world == mesh.rank:
                pack, messages = prepare_pack(index, pack_samples, self._reader)
                packs.append(pack)
                bad_media += messages
        return balancer(LoadedStep(packs, error=bad_media[0] if bad_media else None))

    def _scorer(self, reference: bool) -> Scorer:
        """Return the scorer of the current or the reference model. It is built on first use.

        Collective: all ranks must call it.
        """
        if reference not in self._scorers:
            self._scorers[reference] = self._build_scorer(reference)
        return self._scorers[reference]

    def _build_scorer(self, reference: bool) -> Scorer:
        model = self.model
        if reference:  # build the reference model as preference losses do
            dpo = DPO()
            sync_errors(self.mesh, lambda: dpo.set_up(self.model, self.mesh, self.config))
            model = dpo.reference.scorer.model
        # Compute logits in chunks if and only if the training losses do, so that equal policies give a ratio of
        # exactly 1.
        assert isinstance(self._setup.objective, LanguageObjective), "rollouts are text"
        losses = [loss.loss for loss in self._setup.objective.token_losses]
        chunked = [loss.chunked for loss in losses if isinstance(loss, HeadLoss)]
        recorder = LogProbabilityRecorder(self._temperature, chunked=chunked[0] if chunked else None)
        named_loss = name_loss("log_probabilities", recorder)
        objective = sync_errors(self.mesh, lambda: build_objective(model, self.mesh, self.config, [named_loss]))
        assert isinstance(objective, LanguageObjective)
        return Scorer(objective, Balancer(model, self.mesh, self.config), recorder)


def temperature_of(losses: Sequence[NamedLoss]) -> float:
    """Return the sampling temperature that all policy losses assume; 1.0 if there is no policy loss.

    Raises:
        UserError: If the losses have different temperatures.
    """
    temperatures = {loss.loss.temperature: loss.who for loss in losses if isinstance(loss.loss, Policy)}
    if len(temperatures) > 1:
        listed = ", ".join(f"{temperature:g} ({who})" for temperature, who in temperatures.items())
        raise UserError(
            f"train.losses: the losses have different temperatures: {listed}. Set all of them to the sampling "
            "temperature of the rollouts."
        )
    return next(iter(temperatures), 1.0)
