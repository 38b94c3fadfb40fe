"""What OmniZoo takes for granted of encoders and decoders, as checks for tests of one's own.

    check_encoder(MyEncoder(width=32), [Media("thermal", values, {}) for values in ...])

Each says in words what is wrong. All of it is run on the CPU, in fp32, in one process.
"""

from collections.abc import Sequence

import torch

from omnizoo.modalities.base import Decoder, Encoder, Inputs
from omnizoo.modalities.item import Media

CLOSE = 1e-5


def check_encoder(encoder: Encoder, media: Sequence[Media]) -> None:
    """`media`: several items, best of different sizes. The encoder has weights, as its constructor leaves them."""
    items, places = _prepared(encoder, media)
    alone = [encoder.encode([item]) for item in items]
    for own, each, expected in zip(media, alone, places, strict=True):
        assert each.ndim == 2, f"`encode` must give [places, width], and gave {list(each.shape)}"
        assert len(each) == expected, f"{own.name}: `measure` said {expected} places, `encode` gave {len(each)}"
        assert each.isfinite().all(), f"{own.name}: features that are not finite"
    together = encoder.encode(items)
    _same("features", together.split(places), alone, media)
    _same("features, in another order,", encoder.encode(items[::-1]).split(places[::-1])[::-1], alone, media)
    blank = encoder.encode([encoder.blank()])
    assert len(blank) > 0, "`blank` must take a place: it stands for an item where a rank has none"
    assert blank.shape[1] == together.shape[1], "features of `blank` are of another width"
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        encoder.zero_grad()
        blank.sum().backward()
        _all_reached(encoder, "`encode` of `blank`: ranks without items would wait for others forever")


def check_decoder(decoder: Decoder, media: Sequence[Media], width: int) -> None:
    """`media`: several items, best of different sizes; `width` is the one that the decoder was built for."""
    items, places = _prepared(decoder, media)
    alone = [decoder.targets([item]) for item in items]
    for own, each, expected in zip(media, alone, places, strict=True):
        assert each.ndim == 2, f"`targets` must give [places, K], and gave {list(each.shape)}"
        assert len(each) == expected, f"{own.name}: `measure` said {expected} places, `targets` gave {len(each)}"
        assert not each.requires_grad, "`targets` must carry no gradient"
    together = decoder.targets(items)
    _same("targets", together.split(places), alone, media)
    hidden = torch.randn(len(together), width, generator=torch.Generator().manual_seed(0))
    embedded = decoder.embed(together)
    assert embedded.shape == hidden.shape, f"`embed` must give {list(hidden.shape)}, and gave {list(embedded.shape)}"
    summed = decoder.loss(hidden, together)
    assert summed.ndim == 0, f"`loss` must be one number, and is {list(summed.shape)}"
    parts = sum(decoder.loss(h, t) for h, t in zip(hidden.split(places), together.split(places), strict=True))
    assert torch.allclose(summed, torch.as_tensor(parts), rtol=CLOSE), "`loss` must be a sum over targets, not a mean"
    nothing = decoder.loss(hidden[:0], together[:0])
    assert float(nothing.detach()) == 0, f"`loss` of no targets must be 0, and is {float(nothing.detach())}"
    assert decoder.embed(together[:0]).shape == (0, width), "`embed` of no targets must be [0, width]"


def _prepared(module: Encoder | Decoder, media: Sequence[Media]) -> tuple[list[Inputs], list[int]]:
    assert len(media) > 1, "give at least two items"
    places = [module.measure(each).places for each in media]
    items = [module.prepare(each) for each in media]
    for own, item, again in zip(media, items, [module.prepare(each) for each in media], strict=True):
        for name, tensor in item.items():
            assert isinstance(tensor, torch.Tensor), f"{own.name}: `prepare` gave {name!r}, which is not a tensor"
            assert torch.equal(tensor, again[name]), f"{own.name}: `prepare` gives other values when called again"
            assert not tensor.requires_grad, "`prepare` must not touch weights: it runs in loader workers"
    assert min(places) > 0, "an item must take a place"
    return items, places


def _same(what: str, found: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], media: Sequence[Media]) -> None:
    for own, a, b in zip(media, found, alone, strict=True):
        difference = float((a.detach().double() - b.detach().double()).abs().max())
        allowed = CLOSE * max(1.0, float(b.detach().double().abs().max()))
        assert difference <= allowed, f"{own.name}: {what} depend on the items beside it (by {difference:.1e})"


def _all_reached(module: torch.nn.Module, by: str) -> None:
    missed = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not missed, f"{missed[0]} gets no gradient from {by}"
