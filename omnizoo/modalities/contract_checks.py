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
    items, counts = _prepared(encoder, media)
    alone = [encoder.encode([item]) for item in items]
    for medium, each, expected in zip(media, alone, counts, strict=True):
        assert each.ndim == 2, f"`encode` must return [placeholder tokens, width], not {list(each.shape)}"
        assert len(each) == expected, (
            f"{medium.name}: `measure` returned {expected} placeholder tokens, `encode` {len(each)}"
        )
        assert each.isfinite().all(), f"{medium.name}: features that are not finite"
    together = encoder.encode(items)
    _same("features", together.split(counts), alone, media)
    _same("features, in another order,", encoder.encode(items[::-1]).split(counts[::-1])[::-1], alone, media)
    dummy = encoder.encode([encoder.dummy_input()])
    assert len(dummy) > 0, "`dummy_input` must have a placeholder token: it replaces an item where a rank has none"
    assert dummy.shape[1] == together.shape[1], "features of `dummy_input` have another width"
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        encoder.zero_grad()
        dummy.sum().backward()
        _all_reached(encoder, "`encode` of `dummy_input`: ranks without items would wait for others forever")
    if isinstance(encoder, SharedTower):
        found = [encoder.count_placeholders(item) for item in items]
        assert found == counts, f"`count_placeholders` must return what `measure` returned: {counts}, not {found}"


def check_decoder(decoder: Decoder, media: Sequence[Media], width: int) -> None:
    """Check that a decoder fulfills its contract.

    Args:
        decoder: The decoder to check, with the weights of its constructor.
        media: At least two items, preferably of different sizes.
        width: The width that the decoder was built for.

    Raises:
        AssertionError: If a check fails. The message states the problem.
    """
    items, counts = _prepared(decoder, media)
    alone = [decoder.targets([item]) for item in items]
    for medium, each, expected in zip(media, alone, counts, strict=True):
        assert each.ndim == 2, f"`targets` must return [placeholder tokens, K], not {list(each.shape)}"
        assert len(each) == expected, (
            f"{medium.name}: `measure` returned {expected} placeholder tokens, `targets` {len(each)}"
        )
        assert not each.requires_grad, "`targets` must carry no gradient"
    targets = decoder.targets(items)
    _same("targets", targets.split(counts), alone, media)
    hidden = torch.randn(len(targets), width, generator=torch.Generator().manual_seed(0))
    embedded = decoder.embed(targets)
    assert embedded.shape == hidden.shape, f"`embed` must return {list(hidden.shape)}, not {list(embedded.shape)}"
    assert decoder.embed(targets[:0]).shape == (0, width), "`embed` of no targets must be [0, width]"
    _check_losses(decoder, hidden, targets, counts)
    if isinstance(decoder, LikelihoodDecoder):
        for each in decoder.log_likelihood(hidden, targets):
            assert each.shape == targets.shape[:1], "`log_likelihood` must return two tensors [number of targets]"
    if isinstance(decoder, VocabularyDecoder):
        assert targets.shape[1] == 1, f"targets of a VocabularyDecoder are token ids [N, 1], not {list(targets.shape)}"
    if isinstance(decoder, CustomFlops):
        for method in ("embed", "loss"):
            modules = list(decoder.modules_run_by(method))
            assert all(isinstance(module, torch.nn.Module) for module in modules), "`modules_run_by` returns modules"


def _check_losses(decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor, counts: list[int]) -> None:
    """Check `loss`, or each of the `losses` of a `MultiLossDecoder`."""
    losses, without = losses_by_term(decoder, hidden, targets), losses_by_term(decoder, hidden[:0], targets[:0])
    assert losses.keys() == weights_by_term(decoder).keys(), f"`losses` are not those of `term_weights`: {list(losses)}"
    parts = [losses_by_term(decoder, *each) for each in zip(hidden.split(counts), targets.split(counts), strict=True)]
    for term, loss in losses.items():
        name = f"`losses` {term!r}" if len(losses) > 1 else "`loss`"
        assert loss.ndim == 0, f"{name} must be one number, not {list(loss.shape)}"
        total = torch.stack([part[term] for part in parts]).sum()
        assert torch.allclose(loss, total, rtol=CLOSE), f"{name} must be a sum over targets, not a mean"
        nothing = float(without[term].detach())
        assert nothing == 0, f"{name} of no targets must be 0, not {nothing}"


def _prepared(module: Encoder | Decoder, media: Sequence[Media]) -> tuple[list[Inputs], list[int]]:
    assert len(media) > 1, "give at least two items"
    counts = [module.measure(medium).num_placeholders for medium in media]
    items = [module.prepare(medium) for medium in media]
    for medium, item, again in zip(media, items, [module.prepare(medium) for medium in media], strict=True):
        for name, tensor in item.items():
            assert isinstance(tensor, torch.Tensor), f"{medium.name}: `prepare` returned {name!r}, which is no tensor"
            assert torch.equal(tensor, again[name]), f"{medium.name}: `prepare` returns other values when called again"
            assert not tensor.requires_grad, "`prepare` must not use weights: it runs in loader workers"
    assert min(counts) > 0, "an item must have a placeholder token"
    return items, counts


def _same(what: str, together: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], media: Sequence[Media]) -> None:
    for medium, a, b in zip(media, together, alone, strict=True):
        difference = float((a.detach().double() - b.detach().double()).abs().max())
        allowed = CLOSE * max(1.0, float(b.detach().double().abs().max()))
        assert difference <= allowed, f"{medium.name}: {what} depend on the items beside it (by {difference:.1e})"


def _all_reached(module: torch.nn.Module, by: str) -> None:
    missed = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not missed, f"{missed[0]} gets no gradient from {by}"
