"""Convert rollouts to samples: a prompt, the generated response, and values for each response token."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omnizoo.config.errors import UserError
from omnizoo.data.packing.packer import Packer
from omnizoo.data.rendering.renderer import HERE, Renderer
from omnizoo.data.row import BadRow
from omnizoo.data.sample import RenderedRow, Sample, SampleId
from omnizoo.data.sources.python_rows import PythonRows
from omnizoo.data.token_fields import IGNORE_INDEX, TOKEN_FIELDS, make_columns
from omnizoo.modalities.item import Ids
from omnizoo.modalities.media import BadMedia

Numbers = npt.NDArray[np.float64]
KNOWN = ("advantage", "old", "reference")  # fields of `Rollout` with one value per token


@dataclass(frozen=True)
class Rollout:
    """A prompt and the response that a model generated for it.

    Per-token values have one number for each token of the response.

    Args:
        prompt: Token ids, a string, or chat messages, which may contain media as in rows. Strings and messages are
            rendered with the chat template, up to the start of the response.
        answer: Token ids of the response, including the token that ends it.
        advantage: One value for the whole response, or one per token.
        old: Log-probabilities under the policy that generated the response, per token.
        reference: Log-probabilities under the reference model, per token.
        mask: Whether the model generated each token. Other tokens, such as tool output, are context and not targets.
            Default: the model generated all of them.
        extra: Additional per-token values for custom losses, by name (see `Loss.required_columns`).
    """

    prompt: Any
    answer: Sequence[int]
    advantage: float | Sequence[float] | None = None
    old: Sequence[float] | None = None
    reference: Sequence[float] | None = None
    mask: Sequence[bool] | None = None
    extra: Mapping[str, Sequence[float]] = field(default_factory=dict)


class RolloutRows(PythonRows):
    """A row source without rows. It names the rollout in errors about media."""

    def __init__(self) -> None:
        super().__init__([], "rollouts", HERE)

    def where(self, row: int) -> str:
        return f"{self.name}[{row}]"


class RolloutReader:
    """Converts rollouts to samples. An invalid rollout raises a `UserError` with its number."""

    def __init__(self, renderer: Renderer, pack_tokens: int, vocabulary: int | None) -> None:
        self.renderer, self.pack_tokens, self.vocabulary = renderer, pack_tokens, vocabulary

    def to_score(self, rollouts: Sequence[Rollout], place: str) -> list[Sample]:
        """Return samples for scoring, with all response tokens as targets.

        The column `place` numbers the response tokens consecutively over all rollouts.
        """
        samples, first = [], 0
        for number, (prompt, answer, _) in enumerate(self._read(rollouts)):
            places = np.arange(first, first + len(answer), dtype=np.float64)
            samples.append(self._sample(number, prompt, answer, np.ones(len(answer), np.bool_), {place: places}))
            first += len(answer)
        return samples

    def to_train(self, rollouts: Sequence[Rollout], needs: Iterable[str]) -> list[Sample]:
        """Return samples for training, with the tokens that the model generated as targets.

        Each sample has a column for every value in `needs` and every value that any rollout has.

        Raises:
            UserError: If a rollout lacks one of these values.
        """
        samples, read = [], list(self._read(rollouts))
        wanted = sorted({*needs, *(name for *_, rollout in read for name in _given(rollout))})
        if reserved := TOKEN_FIELDS.keys() & wanted:
            raise UserError(f"rollouts: {min(reserved)} in `extra` is the name of a built-in column; use another name")
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

    def _read(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[RenderedRow, Ids, Rollout]]:
        """Yield (rendered prompt, response ids, rollout). A prompt object that rollouts share is rendered once."""
        if isinstance(rollouts, Rollout | str | bytes) or not isinstance(rollouts, Sequence) or not rollouts:
            shown = "empty" if isinstance(rollouts, Sequence) else f"a {type(rollouts).__name__}"
            raise UserError(f"rollouts: it is {shown}; expected a list of omnizoo.Rollout")
        written: dict[int, RenderedRow] = {}
        for number, rollout in enumerate(rollouts):
            if not isinstance(rollout, Rollout):
                raise UserError(f"rollouts[{number}] is a {type(rollout).__name__}; expected an omnizoo.Rollout")
            if id(rollout.prompt) not in written:
                written[id(rollout.prompt)] = self._prompt(rollout.prompt, f"rollouts[{number}].prompt")
            yield written[id(rollout.prompt)], self._ids(rollout.answer, f"rollouts[{number}].answer"), rollout

    def _prompt(self, prompt: Any, key: str) -> RenderedRow:
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
            try:
                rendered = self.renderer.prompt(prompt)
            except (BadRow, BadMedia) as reason:
                raise UserError(f"{key} cannot be used: {reason}") from None
            # Media that the model generated in earlier turns are not targets.
            return replace(rendered, items=tuple(replace(item, is_target=False) for item in rendered.items))
        ids = self._ids(prompt, key)
        return RenderedRow(make_columns(input_ids=ids))

    def _ids(self, given: Any, key: str) -> Ids:
        ids = _to_array(given)
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
        self, number: int, prompt: RenderedRow, answer: Ids, mask: npt.NDArray[np.bool_], extra: Mapping[str, Numbers]
    ) -> Sample:
        key = f"rollouts[{number}]"
        if not len(prompt):
            raise UserError(f"{key}.prompt is empty: there is nothing to predict the first token of the answer from")
        ids = np.concatenate([prompt.input_ids, answer])
        if len(ids) > self.pack_tokens:
            raise UserError(
                f"{key} has {len(ids)} tokens, which are longer than data.pack_tokens ({self.pack_tokens}); a rollout "
                "is never cut"
            )
        before = len(prompt)
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[before:][mask] = answer[mask]
        positions = self.renderer.positions
        columns = make_columns(
            input_ids=ids,
            labels=labels,
            position_ids=None if positions is None else positions(ids, prompt.items),
            **{name: np.concatenate([np.zeros(before), numbers]) for name, numbers in extra.items()},
        )
        return Sample(columns, prompt.items, id=SampleId(0, 0, number, 0))


def _given(rollout: Rollout) -> dict[str, Any]:
    numbers = {name: value for name in KNOWN if (value := getattr(rollout, name)) is not None}
    return numbers | dict(rollout.extra)


def _to_array(values: Any, dtype: type[np.float64] | None = None) -> npt.NDArray[Any]:
    """Return numbers or a tensor as an array, or an empty 2-D array if they cannot be converted."""
    if isinstance(values, torch.Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError):
        return np.zeros((0, 0))


def _numbers(given: Any, count: int, key: str, may_be_one: bool = False) -> Numbers:
    numbers = _to_array(given, np.float64)
    if may_be_one and not numbers.ndim:
        numbers = np.full(count, numbers)
    if numbers.shape != (count,):
        shown = f"{len(numbers)} numbers" if numbers.ndim == 1 else f"{given!r:.60}"
        raise UserError(f"{key}: {shown}; expected a number for each of the {count} tokens of the answer")
    if not np.isfinite(numbers).all():
        at = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise UserError(f"{key}[{at}] is {numbers[at]}; expected a finite number")
    return numbers


def pack_all(samples: Sequence[Sample], pack_tokens: int) -> list[list[Sample]]:
    """Return all samples in packs of at most `pack_tokens` tokens, each filled as far as possible."""
    packer = Packer(pack_tokens, len(samples))
    for sample in samples:
        packer.add(sample)
    packs = []
    while packer.buffer:
        packs.append(_with_shared_media(packer.pop()))
    return packs


def _with_shared_media(samples: Sequence[Sample]) -> list[Sample]:
    """Merge a media item that several samples of a pack share into one item with several spans, to encode it once."""
    first: dict[int, tuple[int, int]] = {}  # id of the raw item -> (first sample that has it, index of the item there)
    items, starts, start = [list(sample.items) for sample in samples], [], 0
    for number, sample in enumerate(samples):
        starts.append(start)
        start += len(sample)
        for at, item in enumerate(sample.items):
            holder, place = first.setdefault(id(item.raw), (number, at))
            if holder != number:
                own = items[holder][place]
                items[holder][place] = replace(own, spans=own.spans + item.moved(starts[number] - starts[holder]).spans)
        items[number] = [item for at, item in enumerate(items[number]) if first[id(item.raw)] == (number, at)]
    return [replace(sample, items=tuple(own)) for sample, own in zip(samples, items, strict=True)]


def digest(samples: Sequence[Sample]) -> str:
    """Return a hash of all columns and of the ports and spans of media items. The contents of media are not hashed."""
    content = hashlib.blake2b(digest_size=16)
    for sample in samples:
        content.update(repr([(item.port, item.spans) for item in sample.items]).encode())
        for name, column in sample.columns.items():
            content.update(f"{name}{column.shape}".encode() + column.tobytes())
    return content.hexdigest()
