"""Start-up probe: check that a model is causal and keeps the samples of a pack apart.

The probe runs a small copy of the model with random weights, in one process and with the same inputs as in training.
Changing a token must not change the logits of earlier tokens or of other samples. A sample must have the same logits in
a pack as alone; otherwise the model counts positions from the start of the pack. Bidirectional tokens must attend to
each other, and no other token may attend to later ones.
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
LENGTHS = (19, 23, 13)  # number of tokens of each sample in the pack; larger than the attention windows of a small copy
BIDIRECTIONAL = (3, 6)  # bidirectional tokens in each sample (first, count), for models with bidirectional tokens
VOCABULARY = 256
LARGEST = 50_000_000  # maximum number of weights in a small copy, to limit time and host memory
# Relative tolerance between the logits of a sample alone and in a pack. Matmuls of different shapes round differently.
ALONE = 1e-4
SHRINKINGS = (Shrinking(), Shrinking(widths=False), Shrinking(widths=False, depth=False))


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe of a model that passed the checks."""

    shrinking: Shrinking  # how to build small copies of this model family
    random: tuple[str, ...]  # settings that make the model use random numbers in training, with their values
    stubborn: bool = False  # True if no config setting disables the random numbers
    unchecked: str = ""  # reason why the model could not be checked; empty if it was checked


def probe(spec: ModelSection) -> ProbeResult:
    """Check that a model is causal and keeps packed samples apart.

    Takes at most about a second, in one process and without collectives. The adapter is left out, because it processes
    each token separately. Only its dropout is reported.

    Raises:
        UserError: If a token depends on later tokens or on other samples, or the model cannot run on packs.
    """
    with _quiet():
        result = _probe(spec.model_copy(update={"adapter": None}))
    dropout = spec.adapter.dropout if spec.adapter else 0.0
    if not dropout:
        return result
    return replace(result, random=(*result.random, f"model.adapter.dropout {dropout:g}"))


def _probe(spec: ModelSection) -> ProbeResult:
    """Check the first small copy of the model that can be built and run, starting with the smallest."""
    failure: BaseException | None = None
    is_user_module = is_own_module(spec)
    for shrinking in SHRINKINGS[:1] if is_user_module else SHRINKINGS:
        small = replace(shrinking, vocabulary=VOCABULARY)
        try:
            model = _small_copy(spec, small)
            if model is None:
                continue
            run = _Run(model, spec)
            is_random = run.is_random()
        except (UnbuildableError, *BUILDING_ERRORS) as error:
            if is_user_module:
                raise  # the traceback of user code is more helpful than a message
            failure = failure or error
            continue
        model.train(not is_random)
        _check_leaks(run, spec)
        bidirectional = media_model(model).bidirectional
        if bidirectional is not None and attention_name(model) == PACKED:  # other implementations receive a mask
            _check_bidirectional(run, bidirectional)
        if is_random:
            return ProbeResult(shrinking, ("in its code",), stubborn=True)
        if is_user_module:
            return ProbeResult(shrinking, ())
        return ProbeResult(shrinking, _random_settings(spec, small))
    if failure is not None:
        model_type = _language_config(spec).model_type
        raise UserError(
            f"{_key(spec)}: `{model_type}` cannot run on packs without a mask, which training needs: "
            f"{named_line(failure)}. Use another model."
        )
    reason = f"it has more than {LARGEST // 10**6} M weights, and no small copy of it works"
    return ProbeResult(SHRINKINGS[0], (), unchecked=reason)


def active_dropout(model: nn.Module) -> dict[str, float]:
    """Return the nonzero dropout probabilities, keyed by module name."""
    return {name: module.p for name, module in model.named_modules() if isinstance(module, DROPOUT) and module.p > 0}


def dropout_of_media(model: nn.Module) -> list[str]:
    """Return the active dropout of encoders, followers and decoders. The probe does not run these modules."""
    media = media_model(model)
    described = []
    for role in ("encoder", "follower", "decoder"):
        for media_module in media.modules_of(role):
            if not media_module.module:
                continue
            submodule = model.get_submodule(media_module.module)
            for name, p in active_dropout(submodule).items():
                described.append(f"{media_module.modality}.{name} {p:g}")
    return described


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that silences transformers, because it has logged the same messages about the full model."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _random_settings(spec: ModelSection, shrinking: Shrinking) -> tuple[str, ...]:
    """Return the settings that make the model use random numbers in training; empty if they have no effect."""
    settings = random_fields(_language_config(spec).to_dict())
    if not settings:
        return ()
    model = _small_copy(spec, replace(shrinking, random=True))
    if model is None or not _Run(model, spec).is_random():
        return ()
    return tuple(f"{name} {value:g}" for name, value in settings.items())


def _language_config(spec: ModelSection) -> PretrainedConfig:
    return language_config(read_model_config(spec))


def _small_copy(spec: ModelSection, shrinking: Shrinking) -> nn.Module | None:
    """Build a small copy of the language model, with random weights in fp32 on the CPU; None if it is too large."""
    model = _build(spec, shrinking, "meta")
    read_facts(model)  # raises if the model cannot be sharded
    if sum(weight.numel() for weight in model.parameters()) > LARGEST:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _build(spec, shrinking, "cpu")
        if not isinstance(model, PreTrainedModel):
            for module in model.modules():
                reset_parameters = getattr(module, "reset_parameters", None)
                if callable(reset_parameters):
                    reset_parameters()
        for weight in model.parameters():
            # A matrix of zeros would hide every dependency that passes through it.
            weight.add_(0.05 * torch.randn(weight.shape))
    if isinstance(model, PreTrainedModel) and expert_modules(model):
        use_dispatched(language_model(model))
    media_model(model).attach(spec)
    return model.train()


def _build(spec: ModelSection, shrinking: Shrinking, device: str) -> nn.Module:
    """Build a small copy of the language model without setting its weights. User modules keep their size."""
    if is_own_module(spec):
        return build_model(spec, "fp32", device)
    full_config = _language_config(spec)
    config = type(full_config)(**shrink_config(full_config, shrinking, recipe_from_config(spec)))
    config.name_or_path = full_config.name_or_path  # location of code that ships with the model
    return build_from(config, spec, "fp32", device)


class _Run:
    """Runs a model on packs of random token ids."""

    def __init__(self, model: nn.Module, spec: ModelSection) -> None:
        self.model = model
        self.is_composed = spec.foundation is not None
        self.name = f"{_key(spec)}: {type(model).__name__}"
        special: set[int] = set()
        if isinstance(model, PreTrainedModel):
            num_tokens = len(text_embedding(model).get_parameter("weight"))
            special = _special_tokens(model.config.to_dict())
        else:  # the token embedding is unknown: assume the smallest table with at least 16 rows
            sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
            num_tokens = min([size for size in sizes if size >= 16], default=16)
        self.tokens = np.array([token for token in range(min(VOCABULARY, num_tokens)) if token not in special])
        self.random_index = np.random.default_rng(0).integers(0, len(self.tokens), sum(LENGTHS))

    def samples(self, shift: int = 0) -> list[np.ndarray[Any, Any]]:
        """Return the token ids of each sample. A different `shift` changes all token ids."""
        ids = self.tokens[(self.random_index + shift) % len(self.tokens)]
        sample_ends = list(accumulate(LENGTHS))
        return np.split(ids, sample_ends[:-1])

    @torch.no_grad()
    def logits(
        self, samples: Sequence[np.ndarray[Any, Any]], seed: int = 0, bidirectional: BidirectionalTokens | None = None
    ) -> list[torch.Tensor]:
        """Return the logits of each sample, `[length, vocabulary]`, with all samples in one pack.

        Args:
            samples: Token ids of the samples.
            seed: Seed of random numbers in the model.
            bidirectional: The bidirectional tokens of the model. If set, the tokens at `BIDIRECTIONAL` are
                bidirectional.
        """
        inputs = self._inputs(samples, bidirectional)
        if self.is_composed:  # a composed model passes embeddings to its foundation
            assert isinstance(self.model, PreTrainedModel)
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        if not isinstance(self.model, PreTrainedModel):
            check_call(self.model.forward, "forward", self.name, [], inputs)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            output = self.model(**inputs)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise UserError(
                f"{self.name}: forward returned a {type(output).__name__} without `logits`. Return an object whose "
                "`logits` is a tensor."
            )
        is_never_predicted = logits == torch.finfo(logits.dtype).min
        logits = logits.masked_fill(is_never_predicted, 0)
        return list(logits.squeeze(0).split([len(ids) for ids in samples]))

    def _inputs(
        self, samples: Sequence[np.ndarray[Any, Any]], bidirectional: BidirectionalTokens | None
    ) -> dict[str, Any]:
        """Return the model's keyword arguments for a pack of all samples."""
        positions = media_model(self.model).positions
        position_rows = []
        for ids in samples:
            sample_positions = positions(ids.astype(np.int32), []) if positions else np.arange(len(ids))[None]
            position_rows.append(sample_positions)
        position_ids = torch.as_tensor(np.concatenate(position_rows, axis=1))
        if len(position_ids) > 1:
            position_ids = position_ids[:, None]  # [position axes, 1, tokens]

        lengths = [len(ids) for ids in samples]
        spans = None
        if bidirectional is not None:
            spans = BidirectionalSpans(
                lengths, [[BIDIRECTIONAL]] * len(lengths), bidirectional.everywhere, bidirectional.over_windows
            )
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return packed_inputs(cu_seqlens, max(lengths), spans) | {
            "input_ids": torch.as_tensor(np.concatenate(samples))[None],
            "position_ids": position_ids,
            "logits_to_keep": torch.arange(sum(lengths)),
        }

    def is_random(self) -> bool:
        """Whether the model uses random numbers in training."""
        first = torch.cat(self.logits(self.samples(), seed=1))
        second = torch.cat(self.logits(self.samples(), seed=2))
        return not _same(first, second)

    def changed(self, sample: int | None = None, place: int = 0) -> list[np.ndarray[Any, Any]]:
        """Return the samples with changed tokens: all tokens of `sample`, or the token at `place` in every sample."""
        samples = self.samples()
        others = self.samples(shift=1)
        if sample is not None:
            samples[sample] = others[sample]
            return samples
        for ids, other_ids in zip(samples, others, strict=True):
            ids[place] = other_ids[place]
        return samples

    def is_same_alone(self, packed: Sequence[torch.Tensor], bidirectional: BidirectionalTokens | None = None) -> bool:
        """Whether each sample has the same logits alone as in the pack, up to rounding."""
        alone = [self.logits([ids], bidirectional=bidirectional)[0] for ids in self.samples()]
        return all((a - b).norm() <= ALONE * a.norm() for a, b in zip(alone, packed, strict=True))


def _special_tokens(fields: Mapping[str, Any]) -> set[int]:
    """Return the ids of special tokens, such as placeholder tokens, that a model config names."""
    tokens: set[int] = set()
    for key, value in fields.items():
        if isinstance(value, Mapping):
            tokens |= _special_tokens(value)
        elif str(key).endswith(("_token_id", "_token_index")):
            ids = value if isinstance(value, list) else [value]
            tokens |= {token for token in ids if isinstance(token, int)}
    return tokens


def _check_leaks(run: _Run, spec: ModelSection) -> None:
    """Check that logits depend neither on later tokens nor on other samples, and are the same alone as in a pack."""
    subject = run.name
    if spec.attention != "auto":
        subject += f" with model.attention: {spec.attention}"
    logits = run.logits(run.samples())
    for sample in range(len(LENGTHS)):
        changed_logits = run.logits(run.changed(sample=sample))
        for other in range(len(LENGTHS)):
            if other != sample and not _same(logits[other], changed_logits[other]):
                raise UserError(f"{subject} attends across the samples of a pack. {_attention_advice(run, spec)}")
        if _same(logits[sample], changed_logits[sample]):
            raise UserError(f"{subject} returns the same logits for all tokens. Use another model.")
    for place in (1, min(LENGTHS) // 2, -1):
        changed_logits = run.logits(run.changed(place=place))
        if not all(_same(a[:place], b[:place]) for a, b in zip(logits, changed_logits, strict=True)):
            is_encoder = getattr(getattr(run.model, "config", None), "is_decoder", None) is False
            advice = "Set is_decoder: true in its config, or use" if is_encoder else "Use"
            raise UserError(
                f"{subject} attends to later tokens, so it cannot be trained to predict them. {advice} a causal model."
            )
    if not run.is_same_alone(logits):
        raise UserError(
            f"{subject} returns different logits for a sample in a pack than alone. Either its positions do not "
            "restart with each sample, or it selects among the tokens of the whole pack. Use another model family."
        )


def _attention_advice(run: _Run, spec: ModelSection) -> str:
    """Return the advice for a model that attends across the samples of a pack."""
    if spec.attention == "auto" or not isinstance(run.model, PreTrainedModel):
        return "Use another model."
    if not uses_attention_interface(language_model(run.model)):
        return "Use another model."
    return "Set model.attention: auto."


def _check_bidirectional(run: _Run, bidirectional: BidirectionalTokens) -> None:
    """Check that bidirectional tokens attend to each other, and that no other token attends to later ones.

    Raises:
        UserError: If a token attends to other tokens than the recipe describes.
    """
    first, count = BIDIRECTIONAL
    last = first + count - 1
    logits = run.logits(run.samples(), bidirectional=bidirectional)
    # Changed token, and the first token that attends to it. The token after the span is causal.
    for place, first_attending in ((last, first), (last + 1, last + 1)):
        changed_logits = run.logits(run.changed(place=place), bidirectional=bidirectional)
        for a, b in zip(logits, changed_logits, strict=True):
            if not _same(a[:first_attending], b[:first_attending]):
                raise UserError(
                    f"{run.name} attends to later tokens that are not bidirectional in its recipe. Fix the recipe, or "
                    "use another model."
                )
            if any(_same(a[token], b[token]) for token in range(first_attending, place)):
                raise UserError(
                    f"{run.name} does not pass `mutual` to its attention: tokens that are bidirectional in its recipe "
                    "do not attend to each other. Fix the model or the recipe."
                )
    assert run.is_same_alone(logits, bidirectional), "samples of a pack attend to each other's bidirectional spans"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, up to rounding.

    Even unaffected rows may be rounded differently, because expert kernels group rows differently if other rows change.
    """
    return not a.numel() or bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _key(spec: ModelSection) -> str:
    """Return the config key that sets the model, for messages."""
    if spec.module:
        return "model.module"
    if spec.module is not None or spec.given is not None:
        return "model="
    if spec.foundation:
        return "model.foundation"
    return "model.path" if spec.path else "model.config"
