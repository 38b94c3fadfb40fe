"""AdamW over sharded parameters, in groups: those that weight decay pulls on or leaves alone, by learning rate."""

from typing import Any

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.recipes.parts import Treatments


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Each group has its `rate`, relative to `train.lr`: parts of a model may learn faster or slower than the run."""
    train, treatments = config.train, Treatments(model, config.model)
    spared = {parameter for kind in train.no_decay for parameter in _parameters_of(kind, model)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = (treatments.of(name).lr or train.lr) / train.lr
            decay = 0.0 if parameter in spared else train.weight_decay
            groups.setdefault((decay, rate), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda group: (-group[0][0], group[0][1]))
    settings: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay, "rate": rate} for (decay, rate), members in ordered
    ]
    return torch.optim.AdamW(settings, lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


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
