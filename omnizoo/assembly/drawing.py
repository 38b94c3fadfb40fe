"""A model on meta with a rule for every initial weight: some families' own rules leave weights out."""

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.model_section import Model
from omnizoo.models.build import build_model
from omnizoo.recipes.base import recipe_for


@torch.no_grad()
def build_drawn(spec: Model, precision: str) -> nn.Module:
    """`build_model`, and what the recipe says nobody draws is drawn as matrices of the family are."""
    model = build_model(spec, precision)
    left_out = recipe_for(model).undrawn
    for module in model.modules() if left_out else ():
        kind = type(module).__name__
        drawn: list[torch.Tensor] = list(module.parameters(recurse=False)) if kind in left_out else []
        drawn += [b for name, b in module.named_buffers(recurse=False) if f"{kind}.{name}" in left_out]
        for tensor in drawn:
            assert isinstance(model, PreTrainedModel)
            tensor.normal_(0.0, float(model.config.initializer_range))
    return model
