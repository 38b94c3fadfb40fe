"""Render pre-tokenized rows.

Their tokens are used unchanged: no chat template is applied, and no end-of-sequence token or media are added.
"""

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

# Returns the position ids of token ids, or None if the positions are 0, 1, 2, ...
PositionsOfTokens = Callable[[Ids], npt.NDArray[Any] | None]


class TokenRowRenderer:
    """Renders pre-tokenized rows for one tokenizer.

    Args:
        tokenizer: The tokenizer. All ids in a row must be tokens of its vocabulary.
        placeholders: Ids of placeholder tokens for media. Rows must not contain them.
        positions: Returns the position ids of a document.
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
            raise BadRow("no targets: no token contributes to the loss (the first token of a document never does)")
        weight = read_weight(row["weight"], "`weight`") if "weight" in row else 1.0
        if not weight:
            raise BadRow("no targets: `weight` is 0")

        ids = tokens.ids.astype(np.int32)
        positions_of_documents = [self.positions(ids[span]) for span in spans]
        positions = [part for part in positions_of_documents if part is not None]
        loss_weights = None
        if weight != 1:
            loss_weights = np.where(tokens.is_target, np.float32(weight), np.float32(0))
        columns = make_columns(
            input_ids=ids,
            labels=np.where(tokens.is_target, ids, IGNORE_INDEX),
            position_ids=np.concatenate(positions, axis=-1) if positions else None,
            loss_weights=loss_weights,
        )
        return RenderedRow(
            columns,
            is_prose=bool(tokens.is_target[1:].all()),
            documents=tuple(tokens.lengths) if len(spans) > 1 else (),
        )

    def split(self, row: Row) -> tuple[RenderedRow, str, str]:
        """Split a row into a prompt for generation and the expected response.

        The response consists of the last consecutive targets. If no token before them is without a target, the row has
        no prompt, and it is split in the middle.

        Returns:
            The prompt as tokens, the prompt as text, and the expected response as text.

        Raises:
            BadRow: If the row has several documents or only one token.
        """
        tokens = self._read(row)
        if len(tokens.lengths) > 1 or len(tokens.ids) < 2:
            raise BadRow("a pre-tokenized row with several documents, or with one token, cannot be used as a prompt")
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
        """Check that all ids are tokens of the tokenizer, and that none is a placeholder token.

        Raises:
            BadRow: If this is not the case.
        """
        size = len(self.is_known)
        is_wrong = (ids < 0) | (ids >= size) | ~self.is_known[np.clip(ids, 0, size - 1)]
        if is_wrong.any():
            index = int(np.argmax(is_wrong))
            raise BadRow(
                f"`input_ids` is {ids[index]} at entry {index}, which is not a token of the tokenizer "
                f"{self.tokenizer.name_or_path} (ids from 0 to {size - 1}). Use the tokenizer that wrote the rows."
            )
        placeholders = np.intersect1d(ids, self.placeholders)
        if len(placeholders):
            token = self.tokenizer.convert_ids_to_tokens(int(placeholders[0]))
            raise BadRow(
                f"`input_ids` contains {token!r}, a placeholder for media, but pre-tokenized rows cannot have media"
            )

    def _check_end(self, ids: Integers, is_target: Mask) -> None:
        """Check that a row without `attention_mask` does not end with several padding tokens that are targets.

        Raises:
            BadRow: If it does.
        """
        pad = self.tokenizer.pad_token_id
        if pad is None or pad == self.tokenizer.eos_token_id:
            return
        if len(ids) > 1 and (ids[-2:] == pad).all() and is_target[-2:].all():
            raise BadRow(
                f"the row ends with padding tokens ({self.tokenizer.pad_token!r}) that are targets. Add "
                "`attention_mask` with 0 for padding, or remove the padding."
            )
