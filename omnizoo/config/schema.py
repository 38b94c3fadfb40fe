"""The config schema: all sections, and checks that involve several of them.

Every key has a type and a description. The configuration reference and `omnizoo train --help` are generated from them.

The sections `parallel` and `log` do not affect the results of a run. All other sections do.
"""

from typing import Any, Literal

from pydantic import model_validator

from omnizoo.config.sections.base import ConfigSection
from omnizoo.config.sections.checkpoint import CheckpointSection
from omnizoo.config.sections.data import SAMPLES_PER_LANE, DataSection, fitting_lanes
from omnizoo.config.sections.evaluation import EvaluationSection
from omnizoo.config.sections.log import LogSection
from omnizoo.config.sections.loss_options import PREFERENCES, ROUTER_LOSSES, SCORE_LOSSES
from omnizoo.config.sections.model import ModelSection, ScoreHead
from omnizoo.config.sections.optimizer import OptimizerSection
from omnizoo.config.sections.parallel import ParallelSection
from omnizoo.config.sections.train import LossSettings, TrainSection


class Config(ConfigSection):
    """The validated config of a run.

    It is immutable. `omnizoo.load_config` creates it from a YAML file or a mapping.
    """

    model: ModelSection
    """the model: weights from `model.path`, or random initialization of `model.config`"""

    data: DataSection
    """sources of rows, and the conversion of rows to packs"""

    parallel: ParallelSection = ParallelSection()
    """layout of the ranks, and ways to save memory; results do not depend on them"""

    train: TrainSection = TrainSection()
    """length of the run, batch size, learning rate, losses, precision"""

    evaluation: EvaluationSection = EvaluationSection()
    """held-out losses, generated responses, metrics, early stopping"""

    optimizer: OptimizerSection = OptimizerSection()
    """optimizer and parameter groups"""

    checkpoint: CheckpointSection = CheckpointSection()
    """saving and resuming"""

    log: LogSection = LogSection()
    """run folder, console, profiles and callbacks"""

    @property
    def preference_pairs(self) -> Literal["refused", "allowed", "required"]:
        """Whether the losses refuse, allow or require preference rows.

        Preference rows are refused if there is no preference loss, and required if no loss can use other rows.
        """
        kinds = {loss.kind for loss in self.train.losses}
        if kinds.isdisjoint(PREFERENCES):
            return "refused"
        has_decoder = any(modality.decoder is not None for modality in self.model.modalities.values())
        return "allowed" if self.learns_answers or has_decoder else "required"

    @property
    def learns_answers(self) -> bool:
        """Whether the config has a token loss, such as cross entropy. Such a loss also trains on chosen responses."""
        return bool({loss.kind for loss in self.train.losses} - {*PREFERENCES, *ROUTER_LOSSES})

    @property
    def single_answers(self) -> bool:
        """Whether a loss uses single labeled responses instead of preference pairs. Only KTO does."""
        return any(loss.kind == "kto" for loss in self.train.losses)

    @property
    def known_answers(self) -> bool:
        """Whether a loss caches values of its reference model on disk. Responses then need a content hash as a key."""
        return any(loss.kind in PREFERENCES and loss.options.get("reference_cache") for loss in self.train.losses)

    @property
    def mismatched_answers(self) -> bool:
        """Whether the KTO baseline is estimated. Each prompt is then also paired with the response of another row."""
        return any(loss.kind == "kto" and loss.options.get("baseline") != "zero" for loss in self.train.losses)

    def without_cache(self) -> "Config":
        """Return a copy of the config whose losses do not cache reference values on disk.

        Dry runs and `verify` need it, because their weights differ from the weights of the run.
        """
        return self.changed(train={"losses": [_without_cache(loss) for loss in self.train.losses]})

    def changed(self, **sections: dict[str, Any]) -> "Config":
        """Return a copy of the config with some values replaced.

        Args:
            sections: Name of each section to change, and its new values by key. The values are not validated.

        Returns:
            The new config.
        """
        updates = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=updates)

    def with_packs_per_step(self, packs: int) -> "Config":
        """Return a copy of the config whose steps all have this number of packs."""
        sizes = {"packs_per_step": packs, "tokens_per_step": None, "samples_per_step": None, "batch_warmup": None}
        return self.changed(train=sizes)

    @model_validator(mode="before")
    @classmethod
    def _derive_defaults(cls, value: Any) -> Any:
        """Derive `train.packs_per_step`, `model.score_head` and the default of `data.lanes` from other keys."""
        if not isinstance(value, dict):
            return value
        value = _with_score_head(_with_packs_per_step(value))
        data = value.get("data")
        if isinstance(data, dict) and data.get("lanes") is None:
            packs = _value_of(value.get("train"), "packs_per_step")
            samples = _value_of(value.get("train"), "samples_per_step")
            if type(samples) is int and samples > 0:
                packs = max(1, samples // SAMPLES_PER_LANE)
            if type(packs) is not int or packs <= 0:  # validation reports an invalid value
                packs = TrainSection.model_fields["packs_per_step"].default
            value |= {"data": data | {"lanes": fitting_lanes(packs)}}
        return value

    @model_validator(mode="after")
    def _check_loss_names(self) -> "Config":
        """Check that no loss is named like a modality with a decoder, because the decoder's loss has that name."""
        for i, loss in enumerate(self.train.losses):
            modality = self.model.modalities.get(loss.label)
            if modality is not None and modality.decoder is not None:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}): the name {loss.label!r} is already used by the loss of "
                    f"model.modalities.{loss.label}.decoder. Set another `name`."
                )
        return self

    @model_validator(mode="after")
    def _check_score_head(self) -> "Config":
        """Check that the model can have a head for scores, and that nothing generates text with it."""
        losses = [loss.kind for loss in self.train.losses if loss.kind in SCORE_LOSSES]
        if not losses:
            if self.model.score_head is not None:
                raise ValueError(
                    "model.score_head: set automatically by the losses reward and classification. Remove it."
                )
            return self
        if self.model.module or self.model.given is not None or self.model.foundation is not None:
            raise ValueError(
                f"train.losses: {losses[0]} needs a Hugging Face model whose family has a sequence classification "
                "class. Set model.path or model.config."
            )
        if self.evaluation.samples or self.evaluation.metrics:
            key = "samples" if self.evaluation.samples else "metrics"
            raise ValueError(f"evaluation.{key}: a model trained with {losses[0]} generates no text. Remove the key.")
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> "Config":
        """Check that `log.profile` starts within the run."""
        steps = self.log.profiled
        if steps and self.train.epochs is None and steps.start > self.train.steps:
            raise ValueError(
                f"log.profile: {self.log.profile} starts after the last step (train.steps is {self.train.steps}). "
                "Profile steps of the run."
            )
        return self

    @model_validator(mode="after")
    def _check_epochs(self) -> "Config":
        """Check that `train.epochs` is not combined with different weights of sources."""
        weights = self.data.weights or []
        if self.train.epochs is not None and len(set(weights)) > 1:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise ValueError(
                f"train.epochs: every row is read equally often, but data.sources have the weights {listed}. Remove "
                "the weights, or set train.steps."
            )
        return self

    @model_validator(mode="after")
    def _check_look_ahead(self) -> "Config":
        """Check that `data.look_ahead` is not set if the samples of a step are packed separately."""
        samples = self.train.samples_per_step
        if samples is not None and self.data.look_ahead is not None:
            raise ValueError(
                f"data.look_ahead: {self.data.look_ahead} has no effect with train.samples_per_step: {samples}. Only "
                "samples of the same step are packed together. Remove data.look_ahead."
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> "Config":
        """Check that evaluations have data, and that keys which depend on evaluations are only set with them."""
        every = self.evaluation.every
        if every and not self.data.eval_sources:
            raise ValueError(
                f"evaluation.every: {every}, but data.eval_sources is empty. Add held-out data to data.eval_sources, "
                "or set evaluation.every: 0."
            )
        users = {"checkpoint.best": self.checkpoint.best, "evaluation.early_stop": self.evaluation.early_stop}
        for key, setting in users.items():
            if setting is not None and not every:
                raise ValueError(
                    f"{key}: evaluations are required, but evaluation.every is 0. Set evaluation.every and "
                    f"data.eval_sources, or remove {key}."
                )
        return self


def _value_of(section: Any, key: str) -> Any:
    """Return the value of a key in a section. The section may be a mapping or a validated object."""
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _without_cache(loss: LossSettings) -> LossSettings:
    """Return the settings of a loss without the option `reference_cache`."""
    if loss.kind not in PREFERENCES:
        return loss
    options = {name: value for name, value in loss.options.items() if name != "reference_cache"}
    return loss.model_copy(update={"options": options})


def _with_score_head(value: dict[str, Any]) -> dict[str, Any]:
    """Return the config values with `model.score_head`, derived from the loss on scores if there is one.

    Texts to classify then end without an end-of-sequence token by default, as in transformers' pipelines.
    """
    model: Any = value.get("model")
    data: Any = value.get("data")
    losses = _value_of(value.get("train"), "losses")
    for loss in losses if isinstance(losses, list) and model is not None else ():
        kind = _value_of(loss, "kind")
        options = _value_of(loss, "options")
        options = options if isinstance(options, dict) else {}
        head: dict[str, Any] = {"labels": ["reward"], "problem": "reward"}
        if kind == "classification":
            head = {"labels": options.get("labels"), "problem": options.get("problem") or "single"}
            if isinstance(data, dict) and data.get("append_eos") is None:
                value |= {"data": data | {"append_eos": False}}
        elif kind != "reward":
            continue
        if not isinstance(head["labels"], list):
            continue  # validation of the options reports the error
        if isinstance(model, dict):
            value |= {"model": model | {"score_head": head}}
        else:
            value |= {"model": model.model_copy(update={"score_head": ScoreHead.model_validate(head)})}
    return value


def _with_packs_per_step(value: dict[str, Any]) -> dict[str, Any]:
    """Return the config values with `train.packs_per_step`, derived from `train.tokens_per_step` if that is set.

    Raises:
        ValueError: If both keys are set, or if `train.tokens_per_step` is not a multiple of `data.pack_tokens`.
    """
    train: Any = value.get("train")
    tokens = _value_of(train, "tokens_per_step")
    if type(tokens) is not int or tokens <= 0:
        return value
    if isinstance(train, dict) and train.get("packs_per_step") is not None:
        raise ValueError(
            "train.tokens_per_step: train.packs_per_step is also set, and one determines the other. Remove one of them."
        )

    pack_tokens = _value_of(value.get("data"), "pack_tokens") or DataSection.model_fields["pack_tokens"].default
    changes = {"packs_per_step": _num_packs(tokens, pack_tokens)}
    if isinstance(train, dict):
        return value | {"train": train | changes}
    return value | {"train": train.model_copy(update=changes)}


def _num_packs(tokens: int, pack_tokens: Any) -> int:
    """Return the number of packs that `tokens` tokens fill.

    Raises:
        ValueError: If `tokens` is not a multiple of `pack_tokens`.
    """
    if type(pack_tokens) is not int or pack_tokens < 1:
        return 1  # validation of data.pack_tokens reports the error
    packs, rest = divmod(tokens, pack_tokens)
    if rest:
        multiples = " or ".join(f"{n * pack_tokens}" for n in (packs, packs + 1) if n)
        raise ValueError(
            f"train.tokens_per_step: {tokens} is not a multiple of data.pack_tokens {pack_tokens}. Use {multiples}."
        )
    return packs
