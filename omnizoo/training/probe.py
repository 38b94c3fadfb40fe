"""Causality and isolation, tried before a run: does a token see later ones, or those of other samples in its pack?

A small copy of the model with random weights, in one process, is run as training runs it. Changing a token must leave
all that may not see it as it was; and a sample must give the same in a pack as alone, or the model
counts positions from the beginning of the pack. Tokens that are meant to see each other must, and no others.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from omnizoo.assembly.entrance import keep_logits
from omnizoo.assembly.published import media_model
from omnizoo.assembly.shrink import Shrinking, random_fields, shrink_config
from omnizoo.config.doors import check_call
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.model_section import Model
from omnizoo.models.build import (
    UnbuildableError,
    build_from,
    build_model,
    is_own_module,
    read_model_config,
)
from omnizoo.models.experts import expert_modules, use_dispatched
from omnizoo.models.hf_private import (
    PACKED,
    attention_name,
    language_model,
    text_embedding,
    uses_attention_interface,
)
from omnizoo.models.omni import language_config
from omnizoo.ops.mutual import Mutual, MutualTokens
from omnizoo.recipes.base import own_recipe, read_facts
from omnizoo.training.forward import packed_inputs

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
LENGTHS = (19, 23, 13)  # of the samples in the pack: longer than the windows of a shrunken model
MUTUAL = (3, 6)  # where in each of them (first, how many) tokens see each other, if the model has any such
VOCABULARY = 256
LARGEST = 50_000_000  # weights; a copy of more would take seconds, and memory that a host may not have
ALONE = 1e-4  # of a sample's logits, alone against in a pack: shapes differ, and so does rounding
SHRINKINGS = (Shrinking(), Shrinking(widths=False), Shrinking(widths=False, depth=False))
# What a model says, in the words of Python, when it cannot be built or run like this.
FAILURES = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class Probed:
    shrinking: Shrinking  # one that the family can have
    random: tuple[str, ...]  # settings by which the model itself draws random numbers in training
    stubborn: bool = False  # it draws some that no setting of its config turns off
    unchecked: str = ""  # why nothing could be said, if so


def probe(spec: Model) -> Probed:
    """Refuse a model that sees what it may not see. One process, no collectives, a second or less.

    An adapter works on each token by itself: it is left out, and only its dropout told.
    """
    with _quiet():
        probed = _probe(spec.model_copy(update={"adapter": None}))
    dropout = spec.adapter.dropout if spec.adapter else 0.0
    return replace(probed, random=(*probed.random, f"model.adapter.dropout {dropout:g}")) if dropout else probed


def _probe(spec: Model) -> Probed:
    failure: BaseException | None = None
    is_own = is_own_module(spec)
    for shrinking in SHRINKINGS[:1] if is_own else SHRINKINGS:
        small = replace(shrinking, vocabulary=VOCABULARY)
        try:
            model = _small_copy(spec, small)
            if model is None:
                continue
            run = _Run(model, spec)
            is_random = run.is_random()
        except (UnbuildableError, *FAILURES) as error:
            if is_own:
                raise  # a user's own code: its traceback says more than we could
            failure = failure or error
            continue
        model.train(not is_random)
        _refuse_leaks(run, spec)
        mutual = media_model(model).mutual
        if mutual is not None and attention_name(model) == PACKED:  # others are told by a mask
            _check_mutual(run, mutual)
        if is_random or is_own:
            return Probed(shrinking, ("by code of its own",) if is_random else (), stubborn=is_random)
        return Probed(shrinking, _active(spec, small))
    if failure is not None:
        raise UserError(
            f"{_key(spec)}: {_name(spec)} cannot be run as training runs models, packed and without a mask: "
            f"{named_line(failure)}"
        )
    return Probed(
        SHRINKINGS[0], (), unchecked=f"it has more than {LARGEST // 10**6} M weights, and no small copy of it works"
    )


def active_dropout(model: nn.Module) -> dict[str, float]:
    """Dropout modules of `model` that drop something, by name."""
    return {name: module.p for name, module in model.named_modules() if isinstance(module, DROPOUT) and module.p > 0}


def dropout_of_media(model: nn.Module) -> list[str]:
    """Dropout in the encoders and decoders of a model, which the probe does not run."""
    media = media_model(model)
    named = [*media.towers.items(), *media.followers.items()]
    named += ((name, part) for name, own in media.producers.items() for part in own)
    parts = [(name, model.get_submodule(part)) for name, part in named]
    return [f"{name}.{inner} {p:g}" for name, part in parts for inner, p in active_dropout(part).items()]


@contextmanager
def _quiet() -> Iterator[None]:
    """What transformers says about a model, it has said about the real one."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _active(spec: Model, shrinking: Shrinking) -> tuple[str, ...]:
    """The settings of the model by which it draws random numbers in training; none if they have no effect."""
    named = random_fields(_language_config(spec).to_dict())
    if not named:
        return ()
    model = _small_copy(spec, replace(shrinking, random=True))
    is_random = model is not None and _Run(model, spec).is_random()
    return tuple(f"{name} {value:g}" for name, value in named.items()) if is_random else ()


def _language_config(spec: Model) -> PretrainedConfig:
    return language_config(read_model_config(spec))


def _small_copy(spec: Model, shrinking: Shrinking) -> nn.Module | None:
    """The language model of `spec` with random weights in fp32 on the host; None if even so it is too large."""
    model = _build(spec, shrinking, "meta")
    read_facts(model)  # refuses what cannot be sharded
    if sum(weight.numel() for weight in model.parameters()) > LARGEST:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(spec, shrinking, "cpu")
        for module in () if isinstance(model, PreTrainedModel) else model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for weight in model.parameters():
            # A matrix that begins as zero would hide what goes through it.
            weight.add_(0.05 * torch.randn(weight.shape))
    if isinstance(model, PreTrainedModel) and expert_modules(model):
        use_dispatched(language_model(model))
    media_model(model).attach(spec)
    keep_logits(model)
    return model.train()


def _build(spec: Model, shrinking: Shrinking, device: str) -> nn.Module:
    if is_own_module(spec):
        return build_model(spec, "fp32", device)
    published = _language_config(spec)
    config = type(published)(**shrink_config(published, shrinking, own_recipe(spec)))
    config.name_or_path = published.name_or_path  # where code that ships with the model is
    return build_from(config, spec, "fp32", device)


class _Run:
    """A model, and packs of token ids to run it on."""

    def __init__(self, model: nn.Module, spec: Model) -> None:
        self.model, self.composed = model, spec.foundation is not None
        self.name = f"{_key(spec)}: {type(model).__name__}"
        if isinstance(model, PreTrainedModel):
            rows, special = len(text_embedding(model).get_parameter("weight")), _special(model.config.to_dict())
        else:  # which table is that of the tokens is not known; one of a few rows is for something else
            tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
            rows, special = min([size for size in tables if size >= 16], default=16), set()
        self.tokens = np.array([token for token in range(min(VOCABULARY, rows)) if token not in special])
        self.drawn = np.random.default_rng(0).integers(0, len(self.tokens), sum(LENGTHS))

    def samples(self) -> list[np.ndarray[Any, Any]]:
        return np.split(self.tokens[self.drawn], list(accumulate(LENGTHS))[:-1])

    @torch.no_grad()
    def logits(
        self, samples: Sequence[np.ndarray[Any, Any]], seed: int = 0, mutual: MutualTokens | None = None
    ) -> list[torch.Tensor]:
        """`[L, V]` of each sample, all of them in one pack; where `mutual`, with a stretch in each as if by tokens."""
        positions = media_model(self.model).positions
        rows = [positions(ids.astype(np.int32), []) if positions else np.arange(len(ids))[None] for ids in samples]
        lengths = [len(ids) for ids in samples]
        seen = (
            None
            if mutual is None
            else Mutual(lengths, [[MUTUAL]] * len(lengths), mutual.everywhere, mutual.over_windows)
        )
        inputs = packed_inputs(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths), seen)
        inputs |= {
            "input_ids": torch.as_tensor(np.concatenate(samples))[None],
            "position_ids": _as_batch(np.concatenate(rows, axis=1)),
            "logits_to_keep": torch.arange(sum(lengths)),
        }
        if self.composed:  # as a composed model calls its foundation
            assert isinstance(self.model, PreTrainedModel)
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        if not isinstance(self.model, PreTrainedModel):
            check_call(self.model.forward, "forward", self.name, [], inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            output = self.model(**inputs)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise UserError(f"{self.name}: forward gives a {type(output).__name__}; expected an object with `logits`")
        logits = logits.masked_fill(logits == torch.finfo(logits.dtype).min, 0)  # of tokens that it never predicts
        return list(logits.squeeze(0).split(lengths))

    def is_random(self) -> bool:
        """Does the model draw random numbers in training?"""
        first, second = (torch.cat(self.logits(self.samples(), seed)) for seed in (1, 2))
        return not _same(first, second)

    def changed(self, sample: int | None = None, place: int = 0) -> list[np.ndarray[Any, Any]]:
        """The pack with other tokens in all of one sample, or at one place in all samples."""
        others = np.split(self.tokens[(self.drawn + 1) % len(self.tokens)], list(accumulate(LENGTHS))[:-1])
        ids = self.samples()
        for number, (each, other) in enumerate(zip(ids, others, strict=True)):
            if sample is None:
                each[place] = other[place]
            elif number == sample:
                each[:] = other
        return ids


def _special(fields: Mapping[str, Any]) -> set[int]:
    """Tokens with a meaning, such as the place of an item, by a config's own words."""
    found: set[int] = set()
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found |= _special(value)
        elif str(key).endswith(("_token_id", "_token_index")):
            found |= {id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)}
    return found


def _as_batch(positions: np.ndarray[Any, Any]) -> torch.Tensor:
    """[1, T], or [R, 1, T] where a token has several positions."""
    tensor = torch.as_tensor(positions)
    return tensor if len(tensor) == 1 else tensor[:, None]


def _refuse_leaks(run: _Run, spec: Model) -> None:
    who = f"{_key(spec)}: {type(run.model).__name__}"
    told = "" if spec.attention == "auto" else f" with model.attention: {spec.attention}"
    whole = run.logits(run.samples())
    for sample in range(len(LENGTHS)):
        seen = run.logits(run.changed(sample=sample))
        if not all(_same(a, b) for number, (a, b) in enumerate(zip(whole, seen, strict=True)) if number != sample):
            can = isinstance(run.model, PreTrainedModel) and uses_attention_interface(language_model(run.model))
            way = "set model.attention: auto" if spec.attention != "auto" and can else "use another model"
            raise UserError(f"{who}{told} lets the samples of a pack see each other; {way}")
        if _same(whole[sample], seen[sample]):
            raise UserError(f"{who}{told} gives the same logits whatever its tokens are")
    for place in (1, min(LENGTHS) // 2, -1):
        seen = run.logits(run.changed(place=place))
        if not all(_same(a[:place], b[:place]) for a, b in zip(whole, seen, strict=True)):
            encoder = getattr(getattr(run.model, "config", None), "is_decoder", None) is False
            way = "set is_decoder: true in its config, or use" if encoder else "use"
            raise UserError(f"{who}{told} sees later tokens, so it cannot learn to predict them; {way} a causal model")
    for ids, packed in zip(run.samples()[1:], whole[1:], strict=True):
        (alone,) = run.logits([ids])
        if not (alone - packed).norm() <= ALONE * alone.norm():
            raise UserError(
                f"{who}{told} gives a sample other logits in a pack than alone: its positions do not begin anew with "
                "each sample, or it chooses among the tokens of the whole pack; use another family"
            )


def _check_mutual(run: _Run, mutual: MutualTokens) -> None:
    """Tokens of a stretch see each other, nobody else sees ahead, and no other sample sees them."""
    first, count = MUTUAL
    whole = run.logits(run.samples(), mutual=mutual)
    for place, sees in ((first + count - 1, first), (first + count, first + count)):
        seen = run.logits(run.changed(place=place), mutual=mutual)
        for a, b in zip(whole, seen, strict=True):
            if not _same(a[:sees], b[:sees]):
                raise UserError(f"{run.name} sees later tokens than those that its recipe says see each other")
            if any(_same(a[at], b[at]) for at in range(sees, place)):
                raise UserError(
                    f"{run.name} does not hand `mutual` on to its attention: tokens that its recipe says see each "
                    "other do not"
                )
    for ids, packed in zip(run.samples()[1:], whole[1:], strict=True):
        (alone,) = run.logits([ids], mutual=mutual)
        assert (alone - packed).norm() <= ALONE * alone.norm(), "samples of a pack see each other's stretches"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, but for kernels that group rows by what is in other rows (experts)."""
    return not a.numel() or bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _key(spec: Model) -> str:
    if spec.module is not None or spec.given is not None:
        return "model.module" if spec.module else "model="
    return "model.foundation" if spec.foundation else "model.path" if spec.path else "model.config"


def _name(spec: Model) -> str:
    return f"`{_language_config(spec).model_type}`"
