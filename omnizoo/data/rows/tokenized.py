"""Read pre-tokenized rows: token ids with labels, masks and the boundaries of documents packed by another tool."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omnizoo.data.row import BadRow, Row
from omnizoo.data.token_fields import IGNORE_INDEX

# Masks that select the targets. If a row has several, a token is a target only if all of them are 1.
TARGET_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
PER_TOKEN = ("labels", *TARGET_MASKS, "attention_mask", "position_ids")
# Fields of a pre-tokenized row. `cu_seqlens` and `seq_lengths` contain the boundaries of packed documents.
TOKEN_FIELDS_OF_ROWS = ("input_ids", *PER_TOKEN, "cu_seqlens", "seq_lengths")

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenizedDocuments(NamedTuple):
    """The tokens of a row without padding. Several documents are concatenated."""

    ids: Integers  # [tokens]
    is_target: Mask  # [tokens]
    lengths: list[int]  # number of tokens of each document
    has_attention_mask: bool  # whether the row has an attention mask, to mark padding


def read_tokens(row: Row) -> TokenizedDocuments:
    """Read the tokens, targets and documents of a pre-tokenized row.

    Labels and masks must not be shifted: entry i belongs to token i, as in transformers.

    Args:
        row: The row.

    Returns:
        The tokens without padding.

    Raises:
        BadRow: If a field is not valid, or two fields contradict each other.
    """
    ids = _integers(row, "input_ids")
    if not len(ids):
        raise BadRow("`input_ids` is empty")
    columns = {name: _integers(row, name) for name in PER_TOKEN if name in row}
    for name, column in columns.items():
        if len(column) != len(ids):
            raise BadRow(f"`{name}` has {len(column):,} entries, but `input_ids` has {len(ids):,}")

    is_token = _is_token(columns.get("attention_mask"), len(ids))
    is_target = _is_target(columns, ids, is_token)
    starts = _document_starts(row, columns, is_token)
    return TokenizedDocuments(
        ids=ids[is_token],
        is_target=is_target[is_token],
        lengths=np.diff([*starts, int(is_token.sum())]).tolist(),
        has_attention_mask="attention_mask" in columns,
    )


def _integers(row: Row, name: str) -> Integers:
    """Return a field of a row as an array of integers. Masks may also be booleans, or floats without a fraction."""
    value = row[name]
    expected = "expected a flat list of integers"
    if isinstance(value, str):
        raise BadRow(
            f"`{name}` is a string; {expected}. If it contains JSON, list it in json_columns of the data source."
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # raised for nested lists, tensors on a GPU, ...
        raise BadRow(f"`{name}` cannot be read as numbers ({str(error)[:100]}); {expected}") from None
    if array.ndim != 1:
        raise BadRow(f"`{name}` has the shape {list(array.shape)}; {expected}")
    is_mask = name in TARGET_MASKS or name == "attention_mask"
    if is_mask and array.dtype.kind in "bf":
        array = _without_fractions(array, name)
    # Reject booleans among integers, because NumPy would convert them to 0 and 1.
    has_booleans = not is_mask and isinstance(value, list | tuple) and bool in set(map(type, value))
    is_integer = array.dtype.kind in "iu" and not has_booleans
    if array.size and (not is_integer or array.max() > np.iinfo(np.int64).max):
        raise BadRow(f"`{name}` contains {_first_other(value, array)}; {expected}")
    return array.astype(np.int64)


def _first_other(value: Any, array: npt.NDArray[Any]) -> str:
    """Describe the first entry of a field that is not a 64-bit integer, for an error message."""
    if not isinstance(value, list | tuple):
        return f"values of type {array.dtype}"
    others = [entry for entry in value if type(entry) is not int or entry > np.iinfo(np.int64).max]
    return repr(others[0])[:40] if others else f"values of type {array.dtype}"


def _without_fractions(array: npt.NDArray[Any], name: str) -> Integers:
    """Convert a mask of booleans or floats to integers. Raises `BadRow` unless all values are 0 or 1."""
    if not np.isin(array, (0, 1)).all():
        raise BadRow(f"`{name}` contains a value other than 0 and 1. Weights of single tokens are not supported.")
    return array.astype(np.int64)


def _is_token(attention_mask: Integers | None, length: int) -> Mask:
    """Return whether each entry is a token or padding, `[length]`.

    Raises:
        BadRow: If the mask is invalid, or if there is padding between tokens.
    """
    if attention_mask is None:
        return np.ones(length, np.bool_)
    if attention_mask.min() < 0:
        raise BadRow("`attention_mask` contains a negative number; expected 1 for tokens and 0 for padding")
    is_token: Mask = attention_mask > 0
    tokens = np.flatnonzero(is_token)
    if not len(tokens):
        raise BadRow("`attention_mask` is 0 everywhere, so the row has no tokens")
    holes = np.flatnonzero(~is_token[tokens[0] : tokens[-1]])
    if len(holes):
        raise BadRow(
            f"`attention_mask` is 0 at entry {tokens[0] + holes[0]}, between tokens. Only padding at the start or the "
            "end can be removed. To exclude tokens from the loss, use `loss_mask` or `labels`."
        )
    return is_token


def _is_target(columns: dict[str, Integers], ids: Integers, is_token: Mask) -> Mask:
    """Return whether each entry is a target, `[entries]`. Without labels and masks, all tokens are targets.

    Args:
        columns: The fields with one entry for each token.
        ids: The token ids, including padding.
        is_token: Whether each entry is a token or padding.

    Raises:
        BadRow: If a field is invalid, or if padding is a target.
    """
    is_target = is_token.copy()
    selecting = [name for name in ("labels", *TARGET_MASKS) if name in columns]
    for name in selecting:
        column = columns[name]
        if name == "labels":
            selected = column != IGNORE_INDEX
        else:
            selected = column == 1
            others = column[(column != 0) & (column != 1)]
            if len(others):
                raise BadRow(f"`{name}` contains {others[0]}; expected 0 or 1")
        in_padding = np.flatnonzero(selected & ~is_token)
        if len(in_padding):
            value = f"{IGNORE_INDEX}" if name == "labels" else "0"
            raise BadRow(
                f"`{name}` has a target at entry {in_padding[0]}, but `attention_mask` is 0 there. Set it to {value}."
            )
        is_target &= selected
    if "labels" in columns:
        _check_labels(columns["labels"], ids)
    return is_target


def _check_labels(labels: Integers, ids: Integers) -> None:
    """Check that each label is the token itself or `IGNORE_INDEX`. Raises `BadRow` if one is not."""
    is_label = labels != IGNORE_INDEX
    wrong = np.flatnonzero(is_label & (labels != ids))
    if not len(wrong):
        return
    shifted = is_label[:-1]
    if shifted.any() and (labels[:-1] == ids[1:])[shifted].all():
        raise BadRow(
            f"`labels` is shifted by one: entry {wrong[0]} is token {wrong[0] + 1}. Entry i must be token i or "
            f"{IGNORE_INDEX}, as in transformers, because OmniZoo shifts labels itself."
        )
    raise BadRow(
        f"`labels` is {labels[wrong[0]]} at entry {wrong[0]}, where `input_ids` is {ids[wrong[0]]}. Each label must be "
        f"the token itself, or {IGNORE_INDEX} for no target; other targets are not supported."
    )


# Documents that another tool has packed into one row


def _document_starts(row: Row, columns: dict[str, Integers], is_token: Mask) -> list[int]:
    """Return the index of the first token of each document, not counting padding.

    Raises:
        BadRow: If a field is invalid, or if two fields contain different boundaries.
    """
    found: dict[str, list[int]] = {}
    if "position_ids" in columns:
        found["position_ids"] = _starts_of_positions(columns["position_ids"][is_token])
    for name in ("cu_seqlens", "seq_lengths"):
        if name in row:
            found[name] = _starts_of_lengths(name, _integers(row, name), is_token)
    mask = columns.get("attention_mask")
    if mask is not None and mask.max() > 1:  # the mask contains the number of the document instead of 1
        found["attention_mask"] = _starts_of_numbers(mask[is_token])

    names = list(found)
    for name in names[1:]:
        if found[name] != found[names[0]]:
            different = min(set(found[name]) ^ set(found[names[0]]))
            raise BadRow(
                f"`{names[0]}` and `{name}` contradict each other: only one of them starts a document at token "
                f"{different}"
            )
    return found[names[0]] if names else [0]


def _starts_of_positions(positions: Integers) -> list[int]:
    """Return the indices at which positions restart at 0. Raises `BadRow` if positions do not count up."""
    is_start = positions == 0
    follows = np.append(False, np.diff(positions) == 1)
    wrong = np.flatnonzero(~is_start & ~follows)
    if len(wrong):
        raise BadRow(
            f"`position_ids` is {positions[wrong[0]]} at token {wrong[0]}; expected positions that count up from 0 in "
            "each document"
        )
    return [int(start) for start in np.flatnonzero(is_start)]


def _starts_of_lengths(name: str, values: Integers, is_token: Mask) -> list[int]:
    """Return the index of the first token of each document, not counting padding.

    Args:
        name: Name of the field: `cu_seqlens` for cumulative lengths, `seq_lengths` for lengths.
        values: The field.
        is_token: Whether each entry is a token or padding.

    Raises:
        BadRow: If the field does not divide all entries of the row into documents.
    """
    ends = values if name == "cu_seqlens" else np.cumsum(np.append(0, values))
    total = len(is_token)
    if not len(ends) or ends[0] != 0 or ends[-1] != total or (np.diff(ends) <= 0).any():
        expected = f"increasing numbers from 0 to {total}" if name == "cu_seqlens" else f"lengths whose sum is {total}"
        raise BadRow(f"`{name}` is {str(values.tolist())[:80]}; expected {expected}, the length of `input_ids`")
    tokens = np.flatnonzero(is_token)
    inside = [int(start - tokens[0]) for start in ends[:-1] if tokens[0] < start <= tokens[-1]]
    return [0, *inside]


def _starts_of_numbers(numbers: Integers) -> list[int]:
    """Return the index of the first token of each document, from an `attention_mask` with document numbers."""
    steps = np.diff(numbers)
    if (steps < 0).any():
        raise BadRow("`attention_mask` contains document numbers that decrease; expected increasing numbers")
    return [0, *(int(start) for start in np.flatnonzero(steps) + 1)]
