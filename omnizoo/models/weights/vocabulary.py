"""Resize the embedding and the head for a vocabulary with more tokens than the model has rows.

Published rows are kept. New rows are initialized by the family's rule. The full tensor is always initialized, so
the new rows do not depend on the layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.hf_private import names_in_model
from omnizoo.models.untrusted_folders import open_weights

# As in published models, the number of rows is rounded up to a multiple of this number, because matmuls with other
# sizes are slow on accelerators.
MULTIPLE = 64


@dataclass(frozen=True)
class PublishedRows:
    """The published first rows of a weight that was resized."""

    files: list[Path]
    key: str
    rows: int


def may_grow(model: ModelSection) -> bool:
    """Whether the embedding and the head may get rows for new tokens. Default: only in a composed model."""
    return model.foundation is not None if model.resize_vocabulary is None else model.resize_vocabulary


def grow(config: Any, tokens: int, model: ModelSection) -> None:
    """Set the vocabulary size of the transformers config `config` so that it has rows for `tokens` tokens."""
    text = config.get_text_config().get_text_config()  # for a composed model, this is the config of its foundation
    rows = getattr(text, "vocab_size", None)
    if not isinstance(rows, int):
        raise UserError(
            f"model.resize_vocabulary: the config of `{text.model_type}` has no vocab_size, so its vocabulary cannot "
            "be resized. Remove the key."
        )
    if tokens <= rows:
        return
    if model.adapter is not None:
        raise UserError(
            f"model.adapter: the embedding has {rows} rows for {tokens} tokens, and an adapter does not train the "
            f"{tokens - rows} new rows, which are random. Use unused tokens as the `marks` of your modalities, or "
            "train without an adapter first."
        )
    text.vocab_size = -(-tokens // MULTIPLE) * MULTIPLE


def ends(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights of `model` that have a row for each token, keyed by name. Tied weights are returned once."""
    try:
        modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:  # a model without tokens, such as a codec
        return {}
    ids: set[int] = set()
    for module in modules:
        if isinstance(module, nn.Module):
            ids.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids}


def rows_of_files(model: PreTrainedModel, files: list[Path], mapping: list[Any]) -> dict[str, PublishedRows]:
    """Return the embedding and head weights, keyed by name, for which the files contain only the first rows.

    Only headers are read, so all ranks get the same result.
    """
    grown = {}
    shapes = {name: list(parameter.shape) for name, parameter in ends(model).items()}
    with open_weights(files) as weights:
        for key, name in names_in_model(model, weights, mapping).items():
            if name in shapes:
                rows, *width = weights[key].get_shape()
                if rows < shapes[name][0] and width == shapes[name][1:]:
                    grown[name] = PublishedRows(files, key, rows)
    return grown


def with_published_rows(
    initialized: Iterable[tuple[str, torch.Tensor]], published: Mapping[str, PublishedRows]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the randomly `initialized` weights, with their first rows replaced by the `published` rows."""
    for name, tensor in initialized:
        if name in published:
            with open_weights(published[name].files) as weights:
                rows = weights[published[name].key][...]
            tensor = torch.cat([rows.to(tensor.device, tensor.dtype), tensor[len(rows) :]])
        yield name, tensor
