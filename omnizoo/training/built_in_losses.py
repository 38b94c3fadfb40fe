"""The losses that come with OmniZoo, besides those of decoders: of the text, and of the routers of experts."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from omnizoo.config.schema import Config
from omnizoo.data.plan import Totals
from omnizoo.models.hf_private import routers
from omnizoo.models.routing import RouterRecord
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local
from omnizoo.training.loss_contract import Loss
from omnizoo.training.routers import balance_sum, router_z_sum


class CrossEntropy(Loss):
    """Of the next token of the text; a mean over targets, by their weights."""

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        return cross_entropy_sum(logits, batch.targets, batch.weights, self.label_smoothing, self.z_loss)


class Balance(Loss):
    """Even use of experts; a mean over packs."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.add_up = partial(mesh.sum_along, "sp")

    def count(self, totals: Totals) -> float:
        return totals.packs

    def of_routers(self, records: Sequence[RouterRecord], batch: Local) -> torch.Tensor:
        return balance_sum(records, batch.pack_of_token, batch.packs, self.add_up)


class RouterZ(Loss):
    """Small router logits; a mean over tokens and layers."""

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        self.layers = len(routers(model))

    def count(self, totals: Totals) -> float:
        return totals.tokens * self.layers

    def of_routers(self, records: Sequence[RouterRecord], batch: Local) -> torch.Tensor:
        return router_z_sum(records, batch.pack_of_token)
