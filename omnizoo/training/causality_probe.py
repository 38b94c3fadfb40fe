"""Start-up probe: check that a model is causal and keeps the samples of a pack apart.

The probe runs a small copy of the model, with random weights, the same way as training does, in one process. Changing a
token must not change the logits of earlier tokens or of other samples. A sample must have the same logits in a pack as
alone; otherwise the model counts positions from the start of the pack. Bidirectional tokens must attend to each other,
and no other token may attend to later ones.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import check_call
from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.build import BUILDING_ERRORS
from omnizoo.models.build import UnbuildableError, build_from, build_model
from omnizoo.models.hf_private import (
    PACKED,
    attention_name,
    expert_modules,
    language_model,
    text_embedding,
    uses_attention_interface,
)
from omnizoo.models.interfaces.attention import packed_inputs
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.models.media.composed_config import language_config
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.read_config import read_model_config
from omnizoo.models.recipe import read_facts, recipe_from_config
from omnizoo.models.small_config import Shrinking, random_fields, shrink_config
from omnizoo.models.user_module import is_own_module
from omnizoo.ops.attention.bidirectional_spans import BidirectionalSpans, BidirectionalTokens

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
LENGTHS = (19, 23, 13)  # tokens of the samples in the pack; longer than the attention windows of a small copy
MUTUAL = (3, 6)  # bidirectional tokens in each sample (first, count), for models that have them
VOCABULARY = 256
LARGEST = 50_000_000  # weights of a small copy, to limit time and host memory
ALONE = 1e-4  # relative tolerance for logits alone and in a pack: different shapes round differently
SHRINKINGS = (Shrinking(), Shrinking(widths=False), Shrinking(widths=False, depth=False))


@dataclass(frozen=True)
class ProbeResult:
    shrinking: Shrinking  # scaling that works for this model family
    random: tuple[str, ...]  # settings that make the model use random numbers in training, with their values
    stubborn: bool = False  # True if no setting of its config turns the random numbers off
    unchecked: str = ""  # reason why the model could not be checked; empty if it was checked


def probe(spec: ModelSection) -> ProbeResult:
    """Check that a model is causal and keeps packed samples apart.

    Takes at most about a second, in one process and without collectives. The adapter is left out, because it processes
    each token separately. Only its dropout is reported.

    Raises:
        UserError: If a token depends on later tokens or on other samples, or the model cannot run on packs.
    """
    with _quiet():
        probed = _probe(spec.model_copy(update={"adapter": None}))
    dropout = spec.adapter.dropout if spec.adapter else 0.0
    return replace(probed, random=(*probed.random, f"model.adapter.dropout {dropout:g}")) if dropout else probed


def _probe(spec: ModelSection) -> ProbeResult:
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
        except (UnbuildableError, *BUILDING_ERRORS) as error:
            if is_own:
                raise  # user code: its traceback is more helpful than a message
            failure = failure or error
            continue
        model.train(not is_random)
        _refuse_leaks(run, spec)
        mutual = media_model(model).bidirectional
        if mutual is not None and attention_name(model) == PACKED:  # other implementations receive a mask
            _check_mutual(run, mutual)
        if is_random or is_own:
            return ProbeResult(shrinking, ("by code of its own",) if is_random else (), stubborn=is_random)
        return ProbeResult(shrinking, _active(spec, small))
    if failure is not None:
        raise UserError(
            f"{_key(spec)}: `{_language_config(spec).model_type}` cannot be run as training runs models, packed and "
            f"without a mask: "
            f"{named_line(failure)}"
        )
    return ProbeResult(
        SHRINKINGS[0], (), unchecked=f"it has more than {LARGEST // 10**6} M weights, and no small copy of it works"
    )


def active_dropout(model: nn.Module) -> dict[str, float]:
    """Return the dropout probability of each dropout module with a nonzero one, by module name."""
    return {name: module.p for name, module in model.named_modules() if isinstance(module, DROPOUT) and module.p > 0}


def dropout_of_media(model: nn.Module) -> list[str]:
    """Return the active dropout of encoders, followers and decoders, which the probe does not run."""
    media = media_model(model)
    modules = [module for role in ("encoder", "follower", "decoder") for module in media.modules_of(role)]
    parts = [(own.modality, model.get_submodule(own.module)) for own in modules if own.module]
    return [f"{name}.{inner} {p:g}" for name, part in parts for inner, p in active_dropout(part).items()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: silence transformers, which has already logged the same about the full model."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _active(spec: ModelSection, shrinking: Shrinking) -> tuple[str, ...]:
    """Return the settings that make the model use random numbers in training; empty if they have no effect."""
    named = random_fields(_language_config(spec).to_dict())
    if not named:
        return ()
    model = _small_copy(spec, replace(shrinking, random=True))
    is_random = model is not None and _Run(model, spec).is_random()
    return tuple(f"{name} {value:g}" for name, value in named.items()) if is_random else ()


def _language_config(spec: ModelSection) -> PretrainedConfig:
    return language_config(read_model_config(spec))


def _small_copy(spec: ModelSection, shrinking: Shrinking) -> nn.Module | None:
    """Build a small copy of the language model, with random weights in fp32 on the CPU; None if it is too large."""
    model = _build(spec, shrinking, "meta")
    read_facts(model)  # raises if the model cannot be sharded
    if sum(weight.numel() for weight in model.parameters()) > LARGEST:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(spec, shrinking, "cpu")
        for module in () if isinstance(model, PreTrainedModel) else model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for weight in model.parameters():
            # A matrix that is initialized with zeros would hide dependencies through it.
            weight.add_(0.05 * torch.randn(weight.shape))
    if isinstance(model, PreTrainedModel) and expert_modules(model):
        use_dispatched(language_model(model))
    media_model(model).attach(spec)
    return model.train()


def _build(spec: ModelSection, shrinking: Shrinking, device: str) -> nn.Module:
    if is_own_module(spec):
        return build_model(spec, "fp32", device)
    published = _language_config(spec)
    config = type(published)(**shrink_config(published, shrinking, recipe_from_config(spec)))
    config.name_or_path = published.name_or_path  # location of code that ships with the model
    return build_from(config, spec, "fp32", device)


class _Run:
    """Runs a model on packs of random token ids."""

    def __init__(self, model: nn.Module, spec: ModelSection) -> None:
        self.model, self.composed = model, spec.foundation is not None
        self.name = f"{_key(spec)}: {type(model).__name__}"
        if isinstance(model, PreTrainedModel):
            rows, special = len(text_embedding(model).get_parameter("weight")), _special(model.config.to_dict())
        else:  # the token embedding is unknown: assume the smallest table with at least 16 rows
            tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
            rows, special = min([size for size in tables if size >= 16], default=16), set()
        self.tokens = np.array([token for token in range(min(VOCABULARY, rows)) if token not in special])
        self.drawn = np.random.default_rng(0).integers(0, len(self.tokens), sum(LENGTHS))

    def samples(self, shift: int = 0) -> list[np.ndarray[Any, Any]]:
        """Return the token ids of each sample. Another `shift` changes all of them."""
        return np.split(self.tokens[(self.drawn + shift) % len(self.tokens)], list(accumulate(LENGTHS))[:-1])

    @torch.no_grad()
    def logits(
        self, samples: Sequence[np.ndarray[Any, Any]], seed: int = 0, mutual: BidirectionalTokens | None = None
    ) -> list[torch.Tensor]:
        """Return the logits of each sample, `[length, vocabulary]`, with all samples in one pack.

        Args:
            samples: Token ids of the samples.
            seed: Seed of random numbers in the model.
            mutual: The bidirectional tokens of the model. If set, the tokens at `MUTUAL` are bidirectional.
        """
        positions = media_model(self.model).positions
        rows = [positions(ids.astype(np.int32), []) if positions else np.arange(len(ids))[None] for ids in samples]
        lengths = [len(ids) for ids in samples]
        seen = (
            None
            if mutual is None
            else BidirectionalSpans(lengths, [[MUTUAL]] * len(lengths), mutual.everywhere, mutual.over_windows)
        )
        inputs = packed_inputs(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths), seen)
        position_ids = torch.as_tensor(np.concatenate(rows, axis=1))
        inputs |= {
            "input_ids": torch.as_tensor(np.concatenate(samples))[None],
            "position_ids": position_ids if len(position_ids) == 1 else position_ids[:, None],  # [R, 1, T] if R > 1
            "logits_to_keep": torch.arange(sum(lengths)),
        }
        if self.composed:  # a composed model passes embeddings to its foundation
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
        logits = logits.masked_fill(logits == torch.finfo(logits.dtype).min, 0)  # tokens that the model never predicts
        return list(logits.squeeze(0).split(lengths))

    def is_random(self) -> bool:
        """Whether the model uses random numbers in training."""
        first, second = (torch.cat(self.logits(self.samples(), seed)) for seed in (1, 2))
        return not _same(first, second)

    def changed(self, sample: int | None = None, place: int = 0) -> list[np.ndarray[Any, Any]]:
        """Return the samples with other tokens: all tokens of one sample, or the token at `place` of every sample."""
        ids, others = self.samples(), self.samples(shift=1)
        if sample is not None:
            return [*ids[:sample], others[sample], *ids[sample + 1 :]]
        for each, other in zip(ids, others, strict=True):
            each[place] = other[place]
        return ids

    def is_same_alone(self, packed: Sequence[torch.Tensor], mutual: BidirectionalTokens | None = None) -> bool:
        """Whether each sample has the same logits alone as in the pack, up to rounding."""
        alone = [self.logits([ids], mutual=mutual)[0] for ids in self.samples()]
        return all((a - b).norm() <= ALONE * a.norm() for a, b in zip(alone, packed, strict=True))


def _special(fields: Mapping[str, Any]) -> set[int]:
    """Return the ids of special tokens, such as placeholder tokens, that a model config names."""
    found: set[int] = set()
    for key, value in fields.items():
        if isinstance(value, Mapping):
            found |= _special(value)
        elif str(key).endswith(("_token_id", "_token_index")):
            found |= {id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int)}
    return found


def _refuse_leaks(run: _Run, spec: ModelSection) -> None:
    who = run.name if spec.attention == "auto" else f"{run.name} with model.attention: {spec.attention}"
    whole = run.logits(run.samples())
    for sample in range(len(LENGTHS)):
        seen = run.logits(run.changed(sample=sample))
        if not all(_same(a, b) for number, (a, b) in enumerate(zip(whole, seen, strict=True)) if number != sample):
            can = isinstance(run.model, PreTrainedModel) and uses_attention_interface(language_model(run.model))
            way = "set model.attention: auto" if spec.attention != "auto" and can else "use another model"
            raise UserError(f"{who} lets the samples of a pack see each other; {way}")
        if _same(whole[sample], seen[sample]):
            raise UserError(f"{who} gives the same logits whatever its tokens are")
    for place in (1, min(LENGTHS) // 2, -1):
        seen = run.logits(run.changed(place=place))
        if not all(_same(a[:place], b[:place]) for a, b in zip(whole, seen, strict=True)):
            encoder = getattr(getattr(run.model, "config", None), "is_decoder", None) is False
            way = "set is_decoder: true in its config, or use" if encoder else "use"
            raise UserError(f"{who} sees later tokens, so it cannot learn to predict them; {way} a causal model")
    if not run.is_same_alone(whole):
        raise UserError(
            f"{who} gives a sample other logits in a pack than alone: its positions do not begin anew with each "
            "sample, or it chooses among the tokens of the whole pack; use another family"
        )


def _check_mutual(run: _Run, mutual: BidirectionalTokens) -> None:
    """Check that bidirectional tokens attend to each other, and that no other token attends to later ones.

    Raises:
        UserError: If a token attends to other tokens than the recipe describes.
    """
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
    assert run.is_same_alone(whole, mutual), "samples of a pack see each other's stretches"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, up to rounding: kernels of experts group rows depending on other rows."""
    return not a.numel() or bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _key(spec: ModelSection) -> str:
    if spec.module is not None or spec.given is not None:
        return "model.module" if spec.module else "model="
    return "model.foundation" if spec.foundation else "model.path" if spec.path else "model.config"
