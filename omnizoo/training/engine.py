"""The engine for reinforcement learning: what a framework that makes rollouts needs of a trainer, on any layout.

Log-probabilities of given tokens, a policy-gradient step, and the weights, one tensor after the other (docs/rl.md).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from omnizoo.assembly.assemble import assemble, check_same_model
from omnizoo.checkpoint.save import save
from omnizoo.checkpoint.stream import stream_adapter, stream_weights
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.data.flat_pack import flatten
from omnizoo.data.packing import Sample
from omnizoo.data.rollouts import Rollout, RolloutReader, RolloutRows, digest, pack_all
from omnizoo.models.adapter import switched_off
from omnizoo.models.hf_private import PublishedKeys
from omnizoo.ops.precision import exact
from omnizoo.parallel.agree import agree, rank_apart
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallel.rendezvous import place_in_world
from omnizoo.parallel.shard import release
from omnizoo.training.begin import begin, check_parts
from omnizoo.training.built_in_losses import AtHead
from omnizoo.training.loss_contract import NamedLoss, build_losses
from omnizoo.training.losses import Objective
from omnizoo.training.policy_losses import Policy, Recorded
from omnizoo.training.preference_losses import DPO, vocabulary
from omnizoo.training.recompute_budget import chosen, settle
from omnizoo.training.run import on_device, set_up_logging
from omnizoo.training.step import StepData, StepRead, deal_step, train_step


class Engine:
    """A model, its optimizer and its losses on a mesh. All ranks call its methods alike, with the same arguments, and
    all get the same answers."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """On from the newest checkpoint of the run, if there is one, as `omnizoo train` goes on."""
        self.config, self.mesh = config, mesh
        self.directory = Path(config.checkpoint.dir or Path(config.log.dir) / "checkpoints")
        check_parts(config)
        if config.train.epochs is not None:
            raise UserError("train.epochs: an engine reads no rows, so there is nothing to count; set train.steps")
        losses = build_losses(config)
        self._temperature = temperature_of(losses)
        if config.preference_pairs != "refused":
            raise UserError(
                "train.losses: one of them reads preference pairs, which rollouts are not; use grpo or gspo"
            )
        assembled = agree(mesh, lambda: assemble(config))
        check_same_model(config, mesh)
        self.model: nn.Module = assembled.model
        self.tokenizer: Any = assembled.tokenizer
        self._reader = agree(mesh, lambda: assembled.reader([RolloutRows()]))
        self._keys = PublishedKeys(self.model)
        self._begun = begin(self.model, mesh, config, self.directory)
        self.steps: int = self._begun.state.get("step", 0)
        self.bad_steps: int = self._begun.state.get("bad_steps", 0)
        self._rollouts = RolloutReader(self._reader.renderer, config.data.pack_tokens, vocabulary(self.model))
        self._objective = agree(mesh, lambda: Objective(self.model, mesh, config, losses))
        self._needs = sorted({name for loss in losses for name in loss.loss.needs})
        self._is_settled = False  # which blocks are recomputed, where a budget says so: by the first rollouts
        self._scoring: dict[bool, tuple[Objective, Recorded]] = {}  # by whether it is of the reference

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
        """For the length of the block, an engine in a world of its own: one process, or those of torchrun."""
        is_first = (place_in_world() or (0,))[0] == 0
        objects = {"model": model, "tokenizer": tokenizer}
        read = load_config(config, overrides, notices=is_first, objects=objects, needs_data=False)
        with process_group() as process:
            read = on_device(read, process.device)
            # A step is what it is given; any number that fits the ranks will do.
            batch = {"global_batch": process.world_size * read.train.micro_batch, "batch_tokens": None}
            train = read.train.model_copy(update=batch)
            read = read.model_copy(update={"train": train})
            mesh = build_mesh(read, process)
            set_up_logging(mesh)
            yield cls(read, mesh)

    @torch.no_grad()
    def log_probabilities(self, rollouts: Sequence[Rollout], reference: bool = False) -> list[torch.Tensor]:
        """Of each rollout, the log-probability of each token of its answer `[tokens]`, on the host, without dropout; at
        the `temperature` of the losses.

        `reference`: under the model as it was before its first step: the base of the adapter, or a frozen copy, which
        is made when it is first asked for.
        """
        samples = self._agreed(lambda: self._rollouts.to_score(rollouts, Recorded.PLACE))
        objective, recorded = self._scorer(reference)
        data = self._deal(samples, objective)
        lengths = [int(sample.targets.sum()) for sample in samples]
        wide = torch.float64 if self.config.parallel.precision == "fp64" else torch.float32
        recorded.values = torch.zeros(sum(lengths), dtype=wide, device=self.mesh.device)
        model = objective.model
        model.eval()
        with switched_off(model) if reference and model is self.model else nullcontext():
            for batch in data.micro_batches:
                with exact(self.config.parallel.precision):
                    objective.terms(batch)
        objective.take_statistics()
        release(model)
        self.model.train()
        # A token is with one rank: the others have 0 in its place.
        return list(self.mesh.total(recorded.values).cpu().split(lengths))

    def step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One step of the optimizer on the losses of the config (`grpo`, `gspo`, ...), over all `rollouts` together.

        Returns its metrics by the names that `omnizoo train` logs. A step that is not finite leaves the weights as they
        were, and counts in `bad_steps`.
        """
        samples = self._agreed(lambda: self._rollouts.to_train(rollouts, self._needs))
        data = self._deal(samples, self._objective)
        if not self._is_settled:
            settle(self._objective, data, self._begun.state.get("recompute"))
            self._is_settled = True
        self.steps += 1
        result = train_step(self._objective, self._begun.optimizer, data, self.steps)
        self.bad_steps += not result.finite
        return result.metrics() | {"tokens": data.tokens, "bad_steps": self.bad_steps}

    def weights(
        self, dtype: torch.dtype | None = None, everywhere: bool = False, adapter_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor), one after the other, in the names and shapes of the published files; an adapter is
        merged in, or with `adapter_only` given alone by PEFT's names.

        All ranks must go through it to its end; only the first one gets anything, unless `everywhere`. `dtype` None:
        the precision that the weights are held in.
        """
        is_kept = everywhere or self.mesh.is_first
        if adapter_only:
            return stream_adapter(self.model, dtype, is_kept)
        adapter = self.config.model.adapter
        if adapter is not None and adapter.base is not None:
            raise UserError(
                f"weights: the base is held as {adapter.base} (model.adapter.base), and no longer as it was published; "
                "ask for adapter_only=True, and let the rollout engine have the base from its folder"
            )
        return stream_weights(self.model, self._keys, dtype, is_kept)

    def save(self) -> Path:
        """Write a checkpoint: the next engine of this config goes on from it, and `omnizoo export` takes it."""
        state = self._begun.saved() | {"bad_steps": self.bad_steps, "loader": None}
        state |= chosen(self.model, self.config, self.mesh)
        parts = (self.model, self._begun.optimizer, state, self.mesh, self.config, self.tokenizer)
        return save(self.directory, self.steps, *parts)

    def _agreed(self, read: Callable[[], list[Sample]]) -> list[Sample]:
        samples = agree(self.mesh, read)
        if self.mesh.layout.world > 1 and (rank := rank_apart(self.mesh, digest(samples))) is not None:
            raise UserError(f"rollouts: rank {rank} has other ones than rank 0; give all ranks the same list")
        return samples

    def _deal(self, samples: Sequence[Sample], objective: Objective) -> StepData:
        """As in training: each rank prepares some of the packs, and they are shared out by cost."""
        mesh, packs, bad = self.mesh, [], []
        for index, pack in enumerate(pack_all(samples, self.config.data.pack_tokens)):
            if index % mesh.layout.world == mesh.rank:
                flat, undecodable = flatten(index, pack, self._reader)
                packs.append(flat)
                bad += undecodable
        note: dict[str, Any] = {"error": bad[0] if bad else None, "counters": {}, "bad_rows": []}
        return deal_step(StepRead(packs, note), objective)

    def _scorer(self, reference: bool) -> tuple[Objective, Recorded]:
        if reference not in self._scoring:
            model = self.model
            if reference:  # that of preference losses
                dpo = DPO()
                agree(self.mesh, lambda: dpo.set_up(self.model, self.mesh, self.config))
                model = dpo.reference.asked.model
            # As the losses of the steps see the head, so that a ratio of 1 is 1.
            asked = [loss.loss.chunked for loss in self._objective.of_text if isinstance(loss.loss, AtHead)]
            recorded = Recorded(self._temperature, asked[0] if asked else None)
            named = NamedLoss(recorded, "log_probabilities", "recorded", "recorded", 1.0, "of_logits")
            objective = agree(self.mesh, lambda: Objective(model, self.mesh, self.config, [named]))
            self._scoring[reference] = objective, recorded
        return self._scoring[reference]


def temperature_of(losses: Sequence[NamedLoss]) -> float:
    """The one that rollouts are drawn at."""
    found = {loss.loss.temperature: loss.who for loss in losses if isinstance(loss.loss, Policy)}
    if len(found) > 1:
        listed = ", ".join(f"{temperature:g} ({who})" for temperature, who in found.items())
        raise UserError(f"train.losses: the temperatures {listed} differ; expected the one that rollouts are drawn at")
    return next(iter(found), 1.0)
