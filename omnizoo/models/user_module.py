"""Modules that the user passes as Python objects."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError
from omnizoo.config.sections.base import PythonObject
from omnizoo.config.sections.model import ModelSection
from omnizoo.models.hf_private import auto_class


def given_model(model: ModelSection) -> nn.Module:
    """Return the object that was passed to `omnizoo.train(model=...)`. It is never modified; a copy is trained."""
    if not isinstance(model.given, PythonObject):
        raise UserError(
            f"model.given: {model.given} was passed as a Python object. Pass it to omnizoo.train(model=...) again."
        )
    module = model.given.value
    if not isinstance(module, nn.Module):
        description = f"a {type(module).__qualname__}"
        if isinstance(module, type):
            description = f"the class {module.__qualname__}"
        raise UserError(
            f"model=: the value is {description}; expected a torch.nn.Module that is called like a Hugging Face model"
        )
    is_wrapper = type(module).forward is nn.Module.forward
    if isinstance(module, PreTrainedModel) and not is_wrapper and module.get_output_embeddings() is None:
        raise UserError(f"model=: {type(module).__name__} has no head; expected a model that returns logits")
    return module


def is_own_module(model: ModelSection) -> bool:
    """Whether the model is a user-defined module that no transformers config describes. It is used unchanged."""
    if model.given is None:
        return model.module is not None
    module = given_model(model)
    return not (isinstance(module, PreTrainedModel) and auto_class(module.config, model.trust_remote_code) is not None)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter; the first is the name in `named_parameters`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names. Tied tensors are yielded once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
