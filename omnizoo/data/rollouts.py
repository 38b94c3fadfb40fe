"""Rollouts become samples: a prompt, what a model wrote after it, and numbers for each of the tokens written."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.config.errors import UserError
from omnizoo.data.given_rows import GivenRows
from omnizoo.data.packing import Pack, Packer, Sample, SampleId
from omnizoo.data.render import HERE, Renderer
from omnizoo.data.rendered import Rendered
from omnizoo.data.rows import BadRow
from omnizoo.modalities.item import BadMedia
from omnizoo.models.media_model import Ids

Numbers = npt.NDArray[np.float64]
KNOWN = ("advantage", "old", "reference")  # numbers that a rollout has fields for


@dataclass(frozen=True)
class Rollout:
    """A prompt, and what a model wrote after it.

    `prompt`: token ids; or a text or messages, written by the chat template up to where the model shall write. Messages
    may hold media, as those of rows do. `answer`: token ids, the one that ends it included.

    What is given per token is a number for each token of the answer. For a step, `advantage` is that or one number for
    all of them, `old` are the log-probabilities under the policy that wrote it, `reference` those under the reference.
    `mask` tells which tokens the model wrote itself; others, such as what a tool said, are read and not learnt. `extra`
    is for losses of your own (`Loss.needs`).
    """

    prompt: Any
    answer: Sequence[int]
    advantage: float | Sequence[float] | None = None
    old: Sequence[float] | None = None
    reference: Sequence[float] | None = None
    mask: Sequence[bool] | None = None
    extra: Mapping[str, Sequence[float]] = field(default_factory=dict)


class RolloutRows(GivenRows):
    """Where rollouts are, for errors about their media."""

    def __init__(self) -> None:
        super().__init__([], "rollouts", HERE)

    def where(self, row: int) -> str:
        return f"{self.name}[{row}]"


class RolloutReader:
    """Makes samples of rollouts; every mistake is one line with the number of the rollout."""

    def __init__(self, renderer: Renderer, pack_tokens: int, vocabulary: int | None) -> None:
        self.renderer, self.pack_tokens, self.vocabulary = renderer, pack_tokens, vocabulary

    def to_score(self, rollouts: Sequence[Rollout], place: str) -> list[Sample]:
        """With all tokens of the answers as targets, numbered throughout in `place`."""
        samples, first = [], 0
        for number, (prompt, answer, _) in enumerate(self._read(rollouts)):
            places = np.arange(first, first + len(answer), dtype=np.float64)
            samples.append(self._sample(number, prompt, answer, np.ones(len(answer), np.bool_), {place: places}))
            first += len(answer)
        return samples

    def to_train(self, rollouts: Sequence[Rollout], needs: Iterable[str]) -> list[Sample]:
        """With the model's own tokens as targets, and all that losses need. What one rollout has, all must have."""
        samples, read = [], list(self._read(rollouts))
        wanted = sorted({*needs, *(name for *_, rollout in read for name in _given(rollout))})
        for number, (prompt, answer, rollout) in enumerate(read):
            key, count = f"rollouts[{number}]", len(answer)
            mask = np.ones(count, np.bool_)
            if rollout.mask is not None:
                mask = _numbers(rollout.mask, count, f"{key}.mask") != 0
            if not mask.any():
                raise UserError(f"{key}.mask: all of it is false; expected at least one token that the model wrote")
            numbers = _given(rollout)
            for name in wanted:
                if name not in numbers:
                    why = "which the loss needs" if name in needs else "which other rollouts have"
                    raise UserError(f"{key} has no {name}, {why}; expected a number for each of its {count} tokens")
            extra = {name: _numbers(numbers[name], count, f"{key}.{name}", name == "advantage") for name in wanted}
            samples.append(self._sample(number, prompt, answer, mask, extra))
        return samples

    def _read(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[Rendered, Ids, Rollout]]:
        """Each with prompt and answer as the model sees them. A prompt that several rollouts share is written once."""
        if isinstance(rollouts, Rollout | str | bytes) or not isinstance(rollouts, Sequence) or not rollouts:
            shown = "empty" if isinstance(rollouts, Sequence) else f"a {type(rollouts).__name__}"
            raise UserError(f"rollouts: it is {shown}; expected a list of omnizoo.Rollout")
        written: dict[int, Rendered] = {}
        for number, rollout in enumerate(rollouts):
            if not isinstance(rollout, Rollout):
                raise UserError(f"rollouts[{number}] is a {type(rollout).__name__}; expected an omnizoo.Rollout")
            if id(rollout.prompt) not in written:
                written[id(rollout.prompt)] = self._prompt(rollout.prompt, f"rollouts[{number}].prompt")
            yield written[id(rollout.prompt)], self._ids(rollout.answer, f"rollouts[{number}].answer"), rollout

    def _prompt(self, prompt: Any, key: str) -> Rendered:
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            try:
                rendered = self.renderer.prompt(prompt)
            except (BadRow, BadMedia) as reason:
                raise UserError(f"{key} cannot be used: {reason}") from None
            # What the model has drawn or said in earlier turns is not learnt here.
            return replace(rendered, items=tuple(replace(item, is_target=False) for item in rendered.items))
        ids = self._ids(prompt, key)
        return Rendered(ids, np.zeros(len(ids), np.bool_))

    def _ids(self, given: Any, key: str) -> Ids:
        try:
            ids = np.asarray(_on_host(given))
        except (TypeError, ValueError):
            ids = np.zeros((0, 0))
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"{key} is {given!r:.60}; expected token ids, at least one")
        most = np.iinfo(np.int32).max if self.vocabulary is None else self.vocabulary
        if len(outside := ids[(ids < 0) | (ids >= most)]):
            raise UserError(f"{key} has the token {outside[0]}; expected ids from 0 to {most - 1}, the model's")
        if len(places := np.intersect1d(ids, [*self.renderer.placeholders, *self.renderer.reserved])):
            token = self.renderer.tokenizer.convert_ids_to_tokens(int(places[0]))
            way_out = "give the prompt as messages, with the media"
            if key.endswith(".answer"):
                way_out = "media that a model produces are not taken in rollouts, whose numbers are those of tokens"
            raise UserError(f"{key} has {token!r}, the place of media; {way_out}")
        return ids.astype(np.int32)

    def _sample(
        self, number: int, prompt: Rendered, answer: Ids, mask: npt.NDArray[np.bool_], extra: Mapping[str, Numbers]
    ) -> Sample:
        key = f"rollouts[{number}]"
        if not len(prompt.ids):
            raise UserError(f"{key}.prompt is empty: there is nothing to predict the first token of the answer from")
        ids = np.concatenate([prompt.ids, answer])
        if len(ids) > self.pack_tokens:
            raise UserError(
                f"{key} has {len(ids)} tokens, which are longer than data.pack_tokens ({self.pack_tokens}); a rollout "
                "is never cut"
            )
        before = len(prompt.ids)
        positions = self.renderer.positions
        return Sample(
            SampleId(0, 0, number, 0),
            ids,
            np.concatenate([np.zeros(before, np.bool_), mask]),
            prompt.items,
            None if positions is None else positions(ids, prompt.items),
            extra={name: np.concatenate([np.zeros(before), numbers]) for name, numbers in extra.items()},
        )


def _given(rollout: Rollout) -> dict[str, Any]:
    numbers = {name: value for name in KNOWN if (value := getattr(rollout, name)) is not None}
    return numbers | dict(rollout.extra)


def _on_host(given: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        return given
    return (given.double() if given.is_floating_point() else given).detach().cpu().numpy()


def _numbers(given: Any, count: int, key: str, may_be_one: bool = False) -> Numbers:
    try:
        numbers = np.asarray(_on_host(given), np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros((0, 0))
    if may_be_one and not numbers.ndim:
        numbers = np.full(count, numbers)
    if numbers.shape != (count,):
        shown = f"{len(numbers)} numbers" if numbers.ndim == 1 else f"{given!r:.60}"
        raise UserError(f"{key}: {shown}; expected a number for each of the {count} tokens of the answer")
    if not np.isfinite(numbers).all():
        at = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise UserError(f"{key}[{at}] is {numbers[at]}; expected a finite number")
    return numbers


def pack_all(samples: Sequence[Sample], pack_tokens: int) -> list[Pack]:
    """All samples as packs, each as full as it can be."""
    packer = Packer(pack_tokens, len(samples))
    for sample in samples:
        packer.add(sample)
    packs = []
    while packer.buffer:
        packs.append(_with_shared_media(packer.pop()))
    return packs


def _with_shared_media(pack: Pack) -> Pack:
    """`pack` with media of a prompt that several of its samples share at several places: they are encoded once."""
    first: dict[int, tuple[int, int]] = {}  # by raw item: the sample that it comes first in, and its number there
    items, starts, start = [list(sample.items) for sample in pack.samples], [], 0
    for number, sample in enumerate(pack.samples):
        starts.append(start)
        start += len(sample.ids)
        for at, item in enumerate(sample.items):
            holder, place = first.setdefault(id(item.raw), (number, at))
            if holder != number:
                own = items[holder][place]
                items[holder][place] = replace(own, spans=own.spans + item.moved(starts[number] - starts[holder]).spans)
        items[number] = [item for at, item in enumerate(items[number]) if first[id(item.raw)] == (number, at)]
    samples = zip(pack.samples, items, strict=True)
    return Pack(tuple(replace(sample, items=tuple(own)) for sample, own in samples))


def digest(samples: Sequence[Sample]) -> str:
    """Of all but the contents of media."""
    found = hashlib.blake2b(digest_size=16)
    for sample in samples:
        found.update(np.int64(len(sample.ids)).tobytes() + sample.ids.tobytes() + sample.targets.tobytes())
        found.update(repr([(item.port, item.spans) for item in sample.items]).encode())
        for name, numbers in sample.extra.items():
            found.update(name.encode() + numbers.tobytes())
    return found.hexdigest()
