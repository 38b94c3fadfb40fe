"""The config schema: one frozen section per room (`*_section.py`), every key typed, documented and with its default.

A run is a function of this config without `parallel` (and without `log`): the layout never changes what is computed.
`docs/configuration.md` and `omnizoo train --help` are generated from these fields.
"""

from typing import Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from omnizoo.config.data_section import Data, fitting_lanes
from omnizoo.config.loss_kinds import OF_ROUTERS, PREFERENCES
from omnizoo.config.model_section import Model
from omnizoo.config.run_sections import Checkpoint, Evaluation, Log, Parallel
from omnizoo.config.section import Section
from omnizoo.config.train_section import Optimizer, Router, Train


def _value_of(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _packs_of(tokens: int, pack_tokens: Any) -> int:
    if type(pack_tokens) is not int or pack_tokens < 1:
        return 1  # which is a mistake of its own
    packs, rest = divmod(tokens, pack_tokens)
    if rest:
        near = " or ".join(f"{n * pack_tokens}" for n in (packs, packs + 1) if n)
        raise ValueError(
            f"train.batch_tokens is {tokens}, and a step has whole packs of data.pack_tokens {pack_tokens}; expected "
            f"{near}"
        )
    return packs


class Config(Section):
    model: Model = Field(description="what is trained: weights from `model.path`, or random ones from `model.config`")
    data: Data = Field(description="what it is trained on, and how rows become packs")
    parallel: Parallel = Field(
        default_factory=Parallel, description="how it is spread over processes; the numbers do not depend on it"
    )
    train: Train = Field(default_factory=Train, description="the loop: length, batch, learning rate, evaluation")
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="what is looked at on held-out data besides the loss"
    )
    optimizer: Optimizer = Field(
        default_factory=Optimizer, description="what updates the weights, and which of them how"
    )
    router: Router = Field(default_factory=Router, description="routers of a mixture of experts, besides their losses")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="saving and resuming")
    log: Log = Field(default_factory=Log, description="the run folder and what is written about the run")

    @property
    def preference_pairs(self) -> Literal["refused", "allowed", "required"]:
        """What becomes of rows with preferences, by the losses: one of them must read these, and if all do, there is
        nothing to learn from other rows."""
        kinds = {loss.kind for loss in self.train.losses}
        if kinds.isdisjoint(PREFERENCES):
            return "refused"
        produces = any(modality.decoder is not None for modality in self.model.modalities.values())
        return "allowed" if kinds - {*PREFERENCES, *OF_ROUTERS} or produces else "required"

    @property
    def learns_answers(self) -> bool:
        """Good answers of preferences are also learnt by losses of single tokens: what decoders produce, too."""
        return bool({loss.kind for loss in self.train.losses} - {*PREFERENCES, *OF_ROUTERS})

    @property
    def single_answers(self) -> bool:
        """Answers are judged one by one, each by its label, and not in pairs."""
        return any(loss.kind == "kto" for loss in self.train.losses)

    @property
    def known_answers(self) -> bool:
        """Answers are told apart by their content: a loss keeps on disk what it has once computed of them."""
        return any(loss.kind in PREFERENCES and loss.options.get("reference_cache") for loss in self.train.losses)

    def without_cache(self) -> "Config":
        """For trials with other weights: losses keep nothing on disk of what they compute of answers."""
        losses = [
            loss.model_copy(update={"options": {k: v for k, v in loss.options.items() if k != "reference_cache"}})
            if loss.kind in PREFERENCES
            else loss
            for loss in self.train.losses
        ]
        return self.model_copy(update={"train": self.train.model_copy(update={"losses": losses})})

    @property
    def mismatched_answers(self) -> bool:
        """Besides its own answer, each prompt needs that of another row: a loss compares with how likely it is."""
        return any(loss.kind == "kto" and loss.options.get("baseline") != "zero" for loss in self.train.losses)

    @model_validator(mode="before")
    @classmethod
    def _settled(cls, value: Any) -> Any:
        """What follows from other keys: packs of a step from `train.batch_tokens`, and lanes that fit them."""
        if not isinstance(value, dict):
            return value
        data, train = value.get("data"), value.get("train")
        tokens, batch = (_value_of(train, key) for key in ("batch_tokens", "global_batch"))
        if train is not None and type(tokens) is int and tokens > 0:
            if isinstance(train, dict) and batch is not None:
                raise ValueError(
                    "train.batch_tokens and train.global_batch are both set; one follows from the other, so keep one"
                )
            batch = _packs_of(tokens, _value_of(data, "pack_tokens") or Data.model_fields["pack_tokens"].default)
            changed = {"global_batch": batch}
            value = value | {"train": train | changed if isinstance(train, dict) else train.model_copy(update=changed)}
        if isinstance(data, dict) and "lanes" not in data:
            default = Train.model_fields["global_batch"].default
            value |= {"data": data | {"lanes": fitting_lanes(batch if type(batch) is int and batch > 0 else default)}}
        return value

    @model_validator(mode="after")
    def _one_name_each(self) -> "Config":
        for i, loss in enumerate(self.train.losses):
            if (modality := self.model.modalities.get(loss.label)) is not None and modality.decoder is not None:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}) is called {loss.label!r}, as the loss of that decoder is; give it "
                    "another `name`"
                )
        return self

    @model_validator(mode="after")
    def _profiles_steps_it_has(self) -> "Config":
        steps = self.log.profiled
        if steps and self.train.epochs is None and steps.start > self.train.steps:
            raise ValueError(
                f"log.profile is {self.log.profile}, but train.steps is {self.train.steps}; name steps that the run has"
            )
        return self

    @model_validator(mode="after")
    def _reads_every_row(self) -> "Config":
        weights = [source.weight for source in self.data.sources]
        if self.train.epochs is not None and len(set(weights)) > 1:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise ValueError(
                f"train.epochs reads every row equally often, but data.sources have the weights {listed}; leave the "
                "weights out, or set train.steps"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> "Config":
        if self.train.eval_every and not self.data.eval_sources:
            raise ValueError(
                f"train.eval_every is {self.train.eval_every}, but data.eval_sources is empty: there is nothing to "
                "evaluate on; name held-out data there, or set train.eval_every: 0"
            )
        if not self.train.eval_every:
            for key, is_set in (("checkpoint.best", self.checkpoint.best), ("train.early_stop", self.train.early_stop)):
                if is_set is not None:
                    raise ValueError(
                        f"{key} goes by evaluations, but train.eval_every is 0: there are none; set train.eval_every "
                        f"and data.eval_sources, or unset {key}"
                    )
        return self
