"""The per-token columns of samples, packs and batches, and operations on them.

`TOKEN_FIELDS` defines how each column is packed, shifted and sent to the device. Columns are stored by name, with
tokens as the last dimension. A column that no sample has is absent. To add a column, add an entry to `TOKEN_FIELDS`,
fill the column where samples are built, and read it in a loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

IGNORE_INDEX = -100  # label of a token without a target, as in torch's cross entropy
CLASSES = "classes"  # column with the labels of samples to classify
MARGIN = "margin"  # column with the reward margins of preference pairs
COUNT = "count"  # fill value that stands for the numbers 0, 1, 2, ... within each sample or pack

Columns = Mapping[str, npt.NDArray[Any]]
Array = TypeVar("Array", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True)
class TokenField:
    """Properties of one per-token column."""

    name: str
    dtype: npt.DTypeLike | None  # dtype in samples and packs; None for positions (integers or fractions)
    fill: Any  # value for samples and dummy packs that lack the column
    is_next_token: bool = False  # values describe the next token, like labels, so packing shifts them by one
    at_targets: bool = False  # only the values of target tokens are copied to the device
    restarts: bool = False  # when a row is split, the values of each sample begin at 0


TOKEN_FIELDS = {
    field.name: field
    for field in (
        TokenField("input_ids", np.int32, fill=0),
        TokenField("labels", np.int32, fill=IGNORE_INDEX, is_next_token=True, at_targets=True),
        TokenField("position_ids", None, fill=COUNT, restarts=True),
        TokenField("loss_weights", np.float32, fill=1.0, is_next_token=True, at_targets=True),
        # Every token of a sample has the same value, which is read at the last one. With several labels per sample, the
        # column is [words, tokens]: bit i of word w states whether the sample has label `w * WORD_BITS + i`.
        TokenField(CLASSES, np.int32, fill=0, at_targets=True),
        TokenField(MARGIN, np.float64, fill=0.0, at_targets=True),
        # `collate` computes these from the lengths of packs and segments.
        TokenField("pack_of_token", np.int64, fill=-1),
        TokenField("sample_of_token", np.int64, fill=-1),
    )
}


WORD_BITS = 31  # labels per number in the column `CLASSES`


def pack_labels(labels: Sequence[int], num_labels: int) -> npt.NDArray[np.int32]:
    """Return the bits of a set of labels, `[words]`."""
    words = np.zeros(-(-num_labels // WORD_BITS), np.int32)
    for label in labels:
        words[label // WORD_BITS] |= 1 << (label % WORD_BITS)
    return words


def unpack_labels(words: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Return whether each sample has each label, `[samples, labels]`, from the words of `pack_labels`, `[words,
    samples]`."""
    shifts = torch.arange(WORD_BITS, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1  # [words, samples, WORD_BITS]
    return bits.transpose(0, 1).flatten(1)[:, :num_labels].bool()


def score_last_tokens(columns: Columns, lengths: Sequence[int]) -> Columns:
    """Make the last token of each segment the only target, for a model that scores samples. Its label is 0."""
    labels = np.full_like(columns["labels"], IGNORE_INDEX)
    labels[np.cumsum(lengths) - 1] = 0
    kept = {name: column for name, column in columns.items() if name != "loss_weights"}
    return kept | {"labels": labels}


def field_of(name: str) -> TokenField:
    """Return the properties of a column. A column that is not in the table belongs to a loss, with one number per
    target."""
    return TOKEN_FIELDS.get(name) or TokenField(name, np.float64, fill=0.0, is_next_token=True, at_targets=True)


def make_columns(**columns: npt.NDArray[Any] | None) -> Columns:
    """Return the columns that are not None, converted to the dtypes of the table."""
    present = {name: column for name, column in columns.items() if column is not None}
    return {name: np.asarray(column, field_of(name).dtype) for name, column in present.items()}


def num_tokens(columns: Columns) -> int:
    """Return the number of tokens of a sample, pack or batch."""
    tokens: int = columns["input_ids"].shape[-1]
    return tokens


def select(columns: Mapping[str, Array], index: Any) -> dict[str, Array]:
    """Select tokens in all columns. `index` is a slice, a mask or an array of indices."""
    return {name: column[..., index] for name, column in columns.items()}


def cut_piece(columns: Columns, start: int, stop: int) -> Columns:
    """Return the columns of a sample that consists of the tokens from `start` up to `stop` of a row."""
    piece = select(columns, slice(start, stop))
    for name, column in piece.items():
        if start and field_of(name).restarts:
            piece[name] = column - column[..., :1]
    return piece


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Concatenate the columns of samples or packs. A column that a part lacks is filled with its fill value."""
    templates = {name: column for part in parts for name, column in part.items()}
    columns = {}
    for name, template in templates.items():
        pieces = [part[name] if name in part else _fill(part, name, template) for part in parts]
        columns[name] = np.concatenate(pieces, axis=-1)
    return columns


def _fill(part: Columns, name: str, template: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the column `name` for a part that lacks it, filled with its fill value.

    `template` is the same column of another part. It determines the dtype and all dimensions except the last one.
    """
    fill = field_of(name).fill
    length = num_tokens(part)
    values = np.arange(length) if fill == COUNT else fill
    return np.full((*template.shape[:-1], length), values, template.dtype)


def shift_to_next_token(columns: Columns, lengths: Sequence[int]) -> Columns:
    """Shift next-token columns, such as labels, to the left by one token.

    The last token of each segment gets the fill value, so no value crosses a segment boundary.

    Args:
        columns: The columns of a whole pack.
        lengths: The length of each segment in tokens.

    Returns:
        The columns, with copies of the shifted ones.
    """
    shifted = dict(columns)
    last_tokens = np.cumsum(lengths) - 1
    for name, column in columns.items():
        field = field_of(name)
        if field.is_next_token:
            shifted[name] = np.roll(column, -1, axis=-1)
            shifted[name][..., last_tokens] = field.fill
    return shifted


def to_tensors(columns: Columns) -> dict[str, torch.Tensor]:
    """Return the columns as tensors of shape `[1, tokens]` or `[rows, 1, tokens]`. Integers become int64."""
    tensors = {}
    for name, column in columns.items():
        tensor = torch.from_numpy(column).unsqueeze(-2)
        tensors[name] = tensor if tensor.is_floating_point() else tensor.long()
    return tensors
