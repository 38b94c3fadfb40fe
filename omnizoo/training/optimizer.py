"""AdamW over sharded parameters, in two groups: those that weight decay pulls on, and those it leaves alone."""

import torch
from torch import nn

from omnizoo.config.schema import Train


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    spared = {parameter for kind in train.no_decay for parameter in _parameters_of(kind, model)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p not in spared], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def _parameters_of(kind: str, model: nn.Module) -> list[nn.Parameter]:
    if kind == "embedding":
        return [
            p
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        ]
    if kind == "bias":
        return [p for name, p in model.named_parameters() if name.endswith("bias")]
    # Norms are custom classes in most models; what they share is the name, and a weight of one dimension.
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [p for module in norms for p in module.parameters(recurse=False) if p.ndim <= 1]
