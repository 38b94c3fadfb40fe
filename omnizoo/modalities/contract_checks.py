"""Checks of the encoder and decoder contracts, for tests of plugins.

    check_encoder(MyEncoder(width=32), [Media("thermal", values, {}) for values in ...])

Everything runs on the CPU, in fp32, in one process. The checks of a mixin (`SharedTower`, `LikelihoodDecoder`,
`MultiLossDecoder`, `CustomFlops`) run for classes that inherit from it.
"""

from collections.abc import Sequence

import torch

from omnizoo.modalities.base import (
    CustomFlops,
    Decoder,
    Encoder,
    LikelihoodDecoder,
    SharedTower,
    VocabularyDecoder,
    losses_by_term,
    weights_by_term,
)
from omnizoo.modalities.item import Inputs
from omnizoo.modalities.media import Media

CLOSE = 1e-5


def check_encoder(encoder: Encoder, media: Sequence[Media]) -> None:
    """Check that an encoder fulfills its contract.

    Args:
        encoder: The encoder to check, with the weights of its constructor.
        media: At least two items, preferably of different sizes.

    Raises:
        AssertionError: If a check fails. The message states the problem.
    """
    items, counts = _prepare_items(encoder, media)
    separate = [encoder.encode([item]) for item in items]
    for medium, features, expected in zip(media, separate, counts, strict=True):
        assert features.ndim == 2, f"`encode` must return [placeholder tokens, width], not {list(features.shape)}"
        assert len(features) == expected, (
            f"{medium.name}: `measure` returned {expected} placeholder tokens, but `encode` returned {len(features)}"
        )
        assert features.isfinite().all(), f"{medium.name}: features are not finite"

    together = encoder.encode(items)
    _check_equal("features", together.split(counts), separate, media)
    reversed_features = encoder.encode(items[::-1]).split(counts[::-1])
    _check_equal("features, in reverse order,", reversed_features[::-1], separate, media)

    dummy = encoder.encode([encoder.dummy_input()])
    assert len(dummy) > 0, "`dummy_input` must have a placeholder token, because ranks without items encode it"
    assert dummy.shape[1] == together.shape[1], "features of `dummy_input` have a different width"
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        encoder.zero_grad()
        dummy.sum().backward()
        _check_gradients(encoder, "`encode` of `dummy_input`, so ranks without items would deadlock")
    if isinstance(encoder, SharedTower):
        from_inputs = [encoder.count_placeholders(item) for item in items]
        assert from_inputs == counts, f"`count_placeholders` returned {from_inputs}, but `measure` returned {counts}"


def check_decoder(decoder: Decoder, media: Sequence[Media], width: int) -> None:
    """Check that a decoder fulfills its contract.

    Args:
        decoder: The decoder to check, with the weights of its constructor.
        media: At least two items, preferably of different sizes.
        width: The width that the decoder was built for.

    Raises:
        AssertionError: If a check fails. The message states the problem.
    """
    items, counts = _prepare_items(decoder, media)
    separate = [decoder.targets([item]) for item in items]
    for medium, item_targets, expected in zip(media, separate, counts, strict=True):
        assert item_targets.ndim == 2, f"`targets` must return [placeholder tokens, K], not {list(item_targets.shape)}"
        assert len(item_targets) == expected, (
            f"{medium.name}: `measure` returned {expected} placeholder tokens, but `targets` returned "
            f"{len(item_targets)}"
        )
        assert not item_targets.requires_grad, "`targets` must not require gradients"

    targets = decoder.targets(items)
    _check_equal("targets", targets.split(counts), separate, media)

    hidden = torch.randn(len(targets), width, generator=torch.Generator().manual_seed(0))
    embedded = decoder.embed(targets)
    assert embedded.shape == hidden.shape, f"`embed` must return {list(hidden.shape)}, not {list(embedded.shape)}"
    assert decoder.embed(targets[:0]).shape == (0, width), "`embed` of no targets must be [0, width]"
    _check_losses(decoder, hidden, targets, counts)
    _check_mixins(decoder, hidden, targets)


def _check_mixins(decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor) -> None:
    """Check the methods of the mixins that the class of a decoder inherits from."""
    if isinstance(decoder, LikelihoodDecoder):
        for result in decoder.log_likelihood(hidden, targets):
            assert result.shape == targets.shape[:1], "`log_likelihood` must return two tensors [number of targets]"
    if isinstance(decoder, VocabularyDecoder):
        assert targets.shape[1] == 1, f"`targets` of a VocabularyDecoder must be [N, 1], not {list(targets.shape)}"
    if isinstance(decoder, CustomFlops):
        for method in ("embed", "loss"):
            modules = list(decoder.modules_run_by(method))
            assert all(isinstance(module, torch.nn.Module) for module in modules), (
                "`modules_run_by` must return modules"
            )


def _check_losses(decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor, counts: list[int]) -> None:
    """Check `loss`, or each of the `losses` of a `MultiLossDecoder`."""
    losses = losses_by_term(decoder, hidden, targets)
    empty_losses = losses_by_term(decoder, hidden[:0], targets[:0])
    terms = list(weights_by_term(decoder))
    assert set(losses) == set(terms), f"`losses` returned the terms {list(losses)}, but `term_weights` has {terms}"

    losses_by_item = []
    for item_hidden, item_targets in zip(hidden.split(counts), targets.split(counts), strict=True):
        losses_by_item.append(losses_by_term(decoder, item_hidden, item_targets))

    for term, loss in losses.items():
        name = f"`losses` {term!r}" if len(losses) > 1 else "`loss`"
        assert loss.shape in ((), (len(targets),)), f"{name} must be a scalar or [targets], not {list(loss.shape)}"
        total = torch.stack([item_losses[term].sum() for item_losses in losses_by_item]).sum()
        assert torch.allclose(loss.sum(), total, rtol=CLOSE), f"{name} must be a sum over targets, not a mean"
        empty_loss = float(empty_losses[term].detach().sum())
        assert empty_loss == 0, f"{name} of no targets must be 0, not {empty_loss}"


def _prepare_items(module: Encoder | Decoder, media: Sequence[Media]) -> tuple[list[Inputs], list[int]]:
    """Check `measure` and `prepare`, and return the prepared items and their numbers of placeholder tokens."""
    assert len(media) > 1, "pass at least two items"
    counts = [module.measure(medium).num_placeholders for medium in media]
    items = [module.prepare(medium) for medium in media]
    prepared_again = [module.prepare(medium) for medium in media]
    for medium, item, again in zip(media, items, prepared_again, strict=True):
        for name, tensor in item.items():
            assert isinstance(tensor, torch.Tensor), (
                f"{medium.name}: `prepare` must return tensors, but {name!r} is a {type(tensor).__name__}"
            )
            assert torch.equal(tensor, again[name]), f"{medium.name}: `prepare` returned two different {name!r}"
            assert not tensor.requires_grad, "`prepare` must not use weights, because it runs in loader workers"
    assert min(counts) > 0, "each item must have at least one placeholder token"
    return items, counts


def _check_equal(
    what: str, together: Sequence[torch.Tensor], separate: Sequence[torch.Tensor], media: Sequence[Media]
) -> None:
    """Check that the result for an item does not depend on the other items of a call."""
    for medium, actual, expected in zip(media, together, separate, strict=True):
        difference = float((actual.detach().double() - expected.detach().double()).abs().max())
        tolerance = CLOSE * max(1.0, float(expected.detach().double().abs().max()))
        assert difference <= tolerance, (
            f"{medium.name}: {what} depend on the other items of the call (difference: {difference:.1e})"
        )


def _check_gradients(module: torch.nn.Module, source: str) -> None:
    """Check that all trained parameters received a gradient from `source`."""
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"{missing[0]} gets no gradient from {source}"
