"""A vocabulary with more tokens than the model has rows for: embedding and head grow.

Rows that the published weights have are kept; new ones are drawn by the family's own rule, as whole tensors are, and so
do not depend on the layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model

MULTIPLE = 64  # rows are rounded up to it, as published vocabularies are: matmuls of odd sizes are slow on accelerators


@dataclass(frozen=True)
class PublishedRows:
    """The first rows of a weight that has grown."""

    file: Path
    key: str
    rows: int

    def read(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(self.key)
        return tensor


def may_grow(model: Model) -> bool:
    """Whether embedding and head get rows for tokens that have none; of a composed model, unless that is forbidden."""
    return model.foundation is not None if model.resize_vocabulary is None else model.resize_vocabulary


def grow(config: Any, tokens: int, model: Model) -> None:
    """Let `config`, of transformers, have rows for so many tokens."""
    text = config.get_text_config().get_text_config()  # of a composed model, that of its foundation
    rows = getattr(text, "vocab_size", None)
    if not isinstance(rows, int):
        raise UserError(f"model.resize_vocabulary: `{text.model_type}` does not say how large its vocabulary is")
    if tokens <= rows:
        return
    if model.adapter is not None:
        raise UserError(
            f"model.adapter: {tokens - rows} tokens have no row in the embedding of {rows}, and an adapter would leave "
            "new rows as they are drawn; name unused tokens as the `marks` of your modalities, or train without an "
            "adapter first"
        )
    text.vocab_size = -(-tokens // MULTIPLE) * MULTIPLE


def ends(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights of `model`, by name, that have a row for each token; tied ones once."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = {id(p) for module in modules if isinstance(module, nn.Module) for p in module.parameters(recurse=False)}
    return {name: p for name, p in model.named_parameters() if id(p) in own}


def rows_of_files(model: PreTrainedModel, files: Iterable[Path], names: Mapping[str, str]) -> dict[str, PublishedRows]:
    """Weights of embedding and head, by name, of which the files hold the first rows only. `names` are those that the
    keys of the files have in the model. By headers alone, so that all ranks find the same."""
    grown = {}
    wanted = ends(model)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                name = names[key]
                if name in wanted:
                    shape, own = tensors.get_slice(key).get_shape(), wanted[name].shape
                    if shape[0] < own[0] and list(shape[1:]) == list(own[1:]):
                        grown[name] = PublishedRows(file, key, shape[0])
    return grown


def with_published_rows(
    drawn: Iterable[tuple[str, torch.Tensor]], published: Mapping[str, PublishedRows]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`drawn` weights, of which the first rows are those that are `published`."""
    for name, tensor in drawn:
        if name in published:
            rows = published[name].read()
            tensor = torch.cat([rows.to(tensor.device, tensor.dtype), tensor[len(rows) :]])
        yield name, tensor
