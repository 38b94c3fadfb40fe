"""Published models that are a shell around several others and have no forward of their own: calls go to the one of
their parts that reads and writes text, under the keys that their files have."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def open_shell(model: nn.Module) -> None:
    """Give a shell the forward, the embedding and the head of its language model; others stay as they are."""
    if not isinstance(model, PreTrainedModel) or type(model).forward is not nn.Module.forward:
        return
    text = model.config.get_text_config()
    parts = (part for part in model.children() if isinstance(part, PreTrainedModel))
    inner: Any = next(part for part in parts if part.config.get_text_config() is text)
    # Bound methods: in a copy of the model they are those of the copy.
    model.forward = inner.__call__
    model.get_input_embeddings = inner.get_input_embeddings  # type: ignore[method-assign]
    model.get_output_embeddings = inner.get_output_embeddings  # type: ignore[method-assign]
