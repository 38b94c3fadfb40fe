"""Convert rollouts to samples: a prompt, the generated response, and values for each response token."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
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
TOKEN_VALUES = ("advantage", "old", "reference")  # fields of `Rollout` with one value per token


@dataclass(frozen=True)
class Rollout:
    """A prompt and the response that a model generated for it.

    Per-token values have one number for each token of the response.

    Args:
        prompt: Token ids, a string, or chat messages. Messages may contain media, as in rows. Strings and messages are
            rendered with the chat template, up to the start of the response.
        answer: Token ids of the response, including the token that ends it.
        advantage: One value for the whole response, or one per token.
        old: Log-probabilities under the policy that generated the response, per token.
        reference: Log-probabilities under the reference model, per token.
        mask: Whether the model generated each token. Other tokens, such as tool output, are context and not targets.
            Default: the model generated all of them.
        extra: Additional per-token values for custom losses, by name (see `Loss.required_columns`).

    Example:
        >>> omnizoo.Rollout(prompt="2 + 2 =", answer=[220, 19, 2], advantage=1.0, old=[-0.3, -1.2, -0.1])
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
        """Prepare the reader.

        Args:
            renderer: Renders prompts.
            pack_tokens: Maximum number of tokens in a rollout.
            vocabulary: Vocabulary size of the model; None if it is unknown.
        """
        self.renderer = renderer
        self.pack_tokens = pack_tokens
        self.vocabulary = vocabulary

    def to_score(self, rollouts: Sequence[Rollout], place: str) -> list[Sample]:
        """Return samples for scoring, with all response tokens as targets.

        Each sample has a column, named by `place`, with the index of each response token over all rollouts.
        """
        samples = []
        first = 0
        for number, (prompt, answer, _) in enumerate(self._read(rollouts)):
            index = np.arange(first, first + len(answer), dtype=np.float64)
            is_target = np.ones(len(answer), np.bool_)
            samples.append(self._sample(number, prompt, answer, is_target, {place: index}))
            first += len(answer)
        return samples

    def to_train(self, rollouts: Sequence[Rollout], required: Collection[str]) -> list[Sample]:
        """Return samples for training, with the tokens that the model generated as targets.

        Each sample has a column for every name in `required`, and for every per-token value that any rollout has.

        Raises:
            UserError: If a rollout lacks one of these values.
        """
        rendered = list(self._read(rollouts))
        names = set(required)
        for _, _, rollout in rendered:
            names.update(_token_values(rollout))
        reserved = TOKEN_FIELDS.keys() & names
        if reserved:
            raise UserError(
                f"rollouts: `extra` contains {min(reserved)}, which is the name of a built-in column. Use another name."
            )

        samples = []
        for number, (prompt, answer, rollout) in enumerate(rendered):
            key = f"rollouts[{number}]"
            count = len(answer)
            mask = np.ones(count, np.bool_)
            if rollout.mask is not None:
                mask = _numbers(rollout.mask, count, f"{key}.mask") != 0
            if not mask.any():
                raise UserError(f"{key}.mask: no value is true. Set it to true for tokens that the model generated.")
            values = _token_values(rollout)
            columns = {}
            for name in sorted(names):
                if name not in values:
                    reason = "the loss requires it" if name in required else "other rollouts have it"
                    raise UserError(
                        f"{key}.{name}: not set, but {reason}. Set one number for each of the {count} response tokens."
                    )
                columns[name] = _numbers(values[name], count, f"{key}.{name}", may_be_scalar=name == "advantage")
            samples.append(self._sample(number, prompt, answer, mask, columns))
        return samples

    def _read(self, rollouts: Sequence[Rollout]) -> Iterator[tuple[RenderedRow, Ids, Rollout]]:
        """Yield (rendered prompt, response ids, rollout). A prompt object that rollouts share is rendered only once."""
        if isinstance(rollouts, Rollout | str | bytes) or not isinstance(rollouts, Sequence):
            raise UserError(
                f"rollouts: expected a list of omnizoo.Rollout, but got a value of type {type(rollouts).__name__}"
            )
        if not rollouts:
            raise UserError("rollouts: the list is empty. Pass at least one omnizoo.Rollout.")
        prompts: dict[int, RenderedRow] = {}  # keyed by `id` of the prompt object
        for number, rollout in enumerate(rollouts):
            key = f"rollouts[{number}]"
            if not isinstance(rollout, Rollout):
                raise UserError(f"{key}: expected an omnizoo.Rollout, but got a value of type {type(rollout).__name__}")
            if id(rollout.prompt) not in prompts:
                prompts[id(rollout.prompt)] = self._prompt(rollout.prompt, f"{key}.prompt")
            yield prompts[id(rollout.prompt)], self._ids(rollout.answer, f"{key}.answer"), rollout

    def _prompt(self, prompt: Any, key: str) -> RenderedRow:
        """Render a string or chat messages, or convert token ids. `key` names the prompt in messages."""
        is_messages = isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
        if not isinstance(prompt, str) and not is_messages:
            ids = self._ids(prompt, key)
            return RenderedRow(make_columns(input_ids=ids))
        try:
            rendered = self.renderer.prompt(prompt)
        except (BadRow, BadMedia) as reason:
            raise UserError(f"{key}: the prompt cannot be used: {reason}") from None
        # Media that the model generated in earlier turns are not targets.
        items = tuple(replace(item, is_target=False) for item in rendered.items)
        return replace(rendered, items=items)

    def _ids(self, values: Any, key: str) -> Ids:
        """Convert token ids to an array. Raise a `UserError` if one is invalid or a placeholder token."""
        ids = _to_array(values)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"{key}: {values!r:.60} is not a list of token ids. Pass at least one token id.")
        limit = np.iinfo(np.int32).max if self.vocabulary is None else self.vocabulary
        outside = ids[(ids < 0) | (ids >= limit)]
        if len(outside):
            raise UserError(f"{key}: token id {outside[0]} is not in the model's vocabulary. Use 0 to {limit - 1}.")
        placeholders = np.intersect1d(ids, [*self.renderer.placeholders, *self.renderer.reserved])
        if len(placeholders):
            token = self.renderer.tokenizer.convert_ids_to_tokens(int(placeholders[0]))
            advice = "Pass the prompt as messages, with the media."
            if key.endswith(".answer"):
                advice = "Rollouts support only responses of text, because their values are per token."
            raise UserError(f"{key}: {token!r} is a placeholder token of media. {advice}")
        return ids.astype(np.int32)

    def _sample(
        self,
        number: int,
        prompt: RenderedRow,
        answer: Ids,
        is_target: npt.NDArray[np.bool_],
        token_values: Mapping[str, Numbers],
    ) -> Sample:
        """Join a prompt and a response.

        Args:
            number: Number of the rollout.
            prompt: The rendered prompt.
            answer: Token ids of the response.
            is_target: Whether each token of the response is a target.
            token_values: Columns with one value per token of the response.
        """
        key = f"rollouts[{number}]"
        if not len(prompt):
            raise UserError(
                f"{key}.prompt: the prompt is empty, so the first token of the response cannot be predicted. Add a "
                "token."
            )
        ids = np.concatenate([prompt.input_ids, answer])
        if len(ids) > self.pack_tokens:
            raise UserError(
                f"{key}: the rollout has {len(ids)} tokens, but data.pack_tokens is {self.pack_tokens}, and rollouts "
                "are never truncated. Raise data.pack_tokens, or pass shorter rollouts."
            )
        num_prompt_tokens = len(prompt)
        labels = np.full_like(ids, IGNORE_INDEX)
        labels[num_prompt_tokens:][is_target] = answer[is_target]
        positions = self.renderer.positions
        padded_values = {}
        for name, values in token_values.items():
            padded_values[name] = np.concatenate([np.zeros(num_prompt_tokens), values])
        columns = make_columns(
            input_ids=ids,
            labels=labels,
            position_ids=None if positions is None else positions(ids, prompt.items),
            **padded_values,
        )
        return Sample(columns, prompt.items, id=SampleId(0, 0, number, 0))


def _token_values(rollout: Rollout) -> dict[str, Any]:
    """Return the per-token values that a rollout has, by name."""
    values = {}
    for name in TOKEN_VALUES:
        value = getattr(rollout, name)
        if value is not None:
            values[name] = value
    return values | dict(rollout.extra)


def _to_array(values: Any, dtype: type[np.float64] | None = None) -> npt.NDArray[Any]:
    """Return numbers or a tensor as an array, or an empty 2-D array if they cannot be converted."""
    if isinstance(values, torch.Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError):
        return np.zeros((0, 0))


def _numbers(values: Any, count: int, key: str, may_be_scalar: bool = False) -> Numbers:
    """Convert per-token values to an array `[count]`. A scalar is repeated if `may_be_scalar`.

    Raises:
        UserError: If the number of values is not `count`, or a value is not finite. The message begins with `key`.
    """
    numbers = _to_array(values, np.float64)
    if may_be_scalar and not numbers.ndim:
        numbers = np.full(count, numbers)
    if numbers.shape != (count,):
        description = f"{len(numbers)} numbers" if numbers.ndim == 1 else f"{values!r:.60}"
        raise UserError(f"{key}: expected one number for each of the {count} response tokens, but got {description}")
    is_finite = np.isfinite(numbers)
    if not is_finite.all():
        index = int(np.flatnonzero(~is_finite)[0])
        raise UserError(f"{key}[{index}]: {numbers[index]} is not finite. Pass finite numbers.")
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
    first: dict[int, tuple[int, int]] = {}  # maps the id of a raw item to (first sample with it, its index there)
    items_by_sample = [list(sample.items) for sample in samples]
    starts = []
    start = 0
    for number, sample in enumerate(samples):
        starts.append(start)
        start += len(sample)
        unshared = []
        for index, item in enumerate(sample.items):
            first_sample, first_index = first.setdefault(id(item.raw), (number, index))
            if first_sample != number:
                shared = items_by_sample[first_sample][first_index]
                moved = item.moved(starts[number] - starts[first_sample])
                items_by_sample[first_sample][first_index] = replace(shared, spans=shared.spans + moved.spans)
            elif first_index == index:
                unshared.append(item)
        items_by_sample[number] = unshared
    return [replace(sample, items=tuple(items)) for sample, items in zip(samples, items_by_sample, strict=True)]


def digest(samples: Sequence[Sample]) -> str:
    """Return a hash of all columns and of the ports and spans of media items. The contents of media are not hashed."""
    content = hashlib.blake2b(digest_size=16)
    for sample in samples:
        content.update(repr([(item.port, item.spans) for item in sample.items]).encode())
        for name, column in sample.columns.items():
            content.update(f"{name}{column.shape}".encode() + column.tobytes())
    return content.hexdigest()
