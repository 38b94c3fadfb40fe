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
    """Return the object that was passed to `omnizoo.train(model=...)`. It is never modified: a copy is trained."""
    if not isinstance(model.given, PythonObject):
        raise UserError(f"model.given: {model.given} was an object in Python; give it to omnizoo.train again")
    found = model.given.value
    if not isinstance(found, nn.Module):
        shown = f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__qualname__}"
        raise UserError(f"model= is {shown}; expected a torch.nn.Module, called as Hugging Face models are")
    is_shell = type(found).forward is nn.Module.forward
    if isinstance(found, PreTrainedModel) and not is_shell and found.get_output_embeddings() is None:
        raise UserError(f"model= is a {type(found).__name__}, which has no head; expected one that gives logits")
    return found


def is_own_module(model: ModelSection) -> bool:
    """Whether the model is user code that no transformers config can build. Such a model is used unchanged."""
    if model.given is None:
        return model.module is not None
    found = given_model(model)
    return not (isinstance(found, PreTrainedModel) and auto_class(found.config, model.trust_remote_code) is not None)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return all names of each parameter; the first is the name in `named_parameters`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return list(names.values())


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with their names; tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
