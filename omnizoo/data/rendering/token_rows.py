"""Render pre-tokenized rows. Their tokens are used unchanged: without chat template, end-of-sequence token or media."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from omnizoo.data.row import BadRow, Row
from omnizoo.data.rows.messages import read_weight
from omnizoo.data.rows.tokenized import Integers, Mask, TokenizedDocuments, read_tokens
from omnizoo.data.sample import RenderedRow
from omnizoo.data.token_fields import IGNORE_INDEX, make_columns
from omnizoo.modalities.item import Ids

PositionsOfTokens = Callable[[Ids], npt.NDArray[Any] | None]  # returns None if the positions are 0, 1, 2, ...


class TokenRowRenderer:
    """Renders pre-tokenized rows for one tokenizer.

    Args:
        tokenizer: Rows may only contain its tokens.
        placeholders: Ids of placeholder tokens for media, which rows must not contain.
        positions: Returns the position ids of a text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, placeholders: Sequence[int], positions: PositionsOfTokens
    ) -> None:
        self.tokenizer = tokenizer
        self.positions = positions
        ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
        self.is_known = np.zeros(ids.max() + 1, np.bool_)
        self.is_known[ids] = True
        self.placeholders = np.array(placeholders, np.int64)

    def render(self, row: Row) -> RenderedRow:
        """Render a row for training. Raises `BadRow` if the row cannot be used."""
        tokens = self._read(row)
        stops = list(accumulate(tokens.lengths, initial=0))
        spans = [slice(start, stop) for start, stop in pairwise(stops)]
        if not any(tokens.is_target[span][1:].any() for span in spans):
            raise BadRow("no targets: no token except possibly the first one of a document contributes to the loss")
        weight = read_weight(row["weight"], "`weight`") if "weight" in row else 1.0
        if not weight:
            raise BadRow("no targets: `weight` is 0")

        ids = tokens.ids.astype(np.int32)
        positions = [part for span in spans if (part := self.positions(ids[span])) is not None]
        columns = make_columns(
            input_ids=ids,
            labels=np.where(tokens.is_target, ids, IGNORE_INDEX),
            position_ids=np.concatenate(positions, axis=-1) if positions else None,
            loss_weights=None if weight == 1 else np.where(tokens.is_target, np.float32(weight), np.float32(0)),
        )
        return RenderedRow(
            columns,
            is_prose=bool(tokens.is_target[1:].all()),
            documents=tuple(tokens.lengths) if len(spans) > 1 else (),
        )

    def split(self, row: Row) -> tuple[RenderedRow, str, str]:
        """Split a row into a prompt, its text, and the text of the expected response.

        The response is the last run of targets. A row without a prompt is split in the middle.
        """
        tokens = self._read(row)
        if len(tokens.lengths) > 1 or len(tokens.ids) < 2:
            raise BadRow("a pre-tokenized row with several documents or one token has no prompt")
        stop = len(tokens.ids)
        start = stop // 2
        targets = np.flatnonzero(tokens.is_target)
        others = np.flatnonzero(~tokens.is_target)
        if len(targets) and len(others) and others[0] < targets[-1]:
            stop = int(targets[-1]) + 1
            start = int(others[others < stop][-1]) + 1
        ids = tokens.ids[:start].astype(np.int32)
        prompt = RenderedRow(make_columns(input_ids=ids, position_ids=self.positions(ids)))
        expected = self.tokenizer.decode(tokens.ids[start:stop], skip_special_tokens=True)
        return prompt, str(self.tokenizer.decode(ids)), str(expected)

    def _read(self, row: Row) -> TokenizedDocuments:
        """Read a row, and check its ids against the vocabulary."""
        tokens = read_tokens(row)
        self._check_ids(tokens.ids)
        if not tokens.has_attention_mask:
            self._check_end(tokens.ids, tokens.is_target)
        return tokens

    def _check_ids(self, ids: Integers) -> None:
        """Raise `BadRow` for ids that are not tokens of the tokenizer, and for placeholder tokens."""
        size = len(self.is_known)
        is_wrong = (ids < 0) | (ids >= size) | ~self.is_known[np.clip(ids, 0, size - 1)]
        if is_wrong.any():
            index = int(np.argmax(is_wrong))
            raise BadRow(
                f"`input_ids` is {ids[index]} at entry {index}, which is no token of the tokenizer "
                f"{self.tokenizer.name_or_path} (ids from 0 to {size - 1}). Use the tokenizer that wrote the rows."
            )
        placeholders = np.intersect1d(ids, self.placeholders)
        if len(placeholders):
            token = self.tokenizer.convert_ids_to_tokens(int(placeholders[0]))
            raise BadRow(f"`input_ids` contains {token!r}, a placeholder for media, which pre-tokenized rows lack")

    def _check_end(self, ids: Integers, is_target: Mask) -> None:
        """Raise `BadRow` if a row without `attention_mask` ends with several padding tokens that are targets."""
        pad = self.tokenizer.pad_token_id
        if pad is None or pad == self.tokenizer.eos_token_id:
            return
        if len(ids) > 1 and (ids[-2:] == pad).all() and is_target[-2:].all():
            raise BadRow(
                f"the row ends with padding ({self.tokenizer.pad_token!r}) that would be learned. Add `attention_mask` "
                "with 0 for padding, or remove the padding."
            )
