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
        if type(module).__name__ in left_out:
            assert isinstance(model, PreTrainedModel)
            for parameter in module.parameters(recurse=False):
                parameter.normal_(0.0, float(model.config.initializer_range))
    return model
