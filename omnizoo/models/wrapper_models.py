"""Published models that wrap several models and have no forward. Calls are passed to the language model inside."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def use_inner_forward(model: nn.Module) -> None:
    """Give a wrapper model the forward, embedding and head of its language model. Other models stay unchanged."""
    if not isinstance(model, PreTrainedModel) or type(model).forward is not nn.Module.forward:
        return
    text = model.config.get_text_config()
    children = (child for child in model.children() if isinstance(child, PreTrainedModel))
    inner: Any = next(child for child in children if child.config.get_text_config() is text)
    # Use bound methods: in a deep copy of the model, these methods refer to the copy.
    model.forward = inner.__call__
    model.get_input_embeddings = inner.get_input_embeddings  # type: ignore[method-assign]
    model.get_output_embeddings = inner.get_output_embeddings  # type: ignore[method-assign]
