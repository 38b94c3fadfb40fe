"""The losses that come with OmniZoo, besides those of decoders: of the text, and of the routers of experts."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.schema import Config
from omnizoo.data.plan import Totals
from omnizoo.models.head import Logits
from omnizoo.models.hf_private import routers
from omnizoo.models.routing import RouterRecord
from omnizoo.ops.cross_entropy import cross_entropy_sum
from omnizoo.ops.linear_cross_entropy import linear_cross_entropy_sum, most_logits
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.forward import Local
from omnizoo.training.loss_contract import Loss
from omnizoo.training.routers import balance_sum, router_z_sum


class AtHead(Loss):
    """Sees logits, or if `chunked` hidden states: never more than a chunk of logits at a time. By default where logits
    would be many."""

    def __init__(self, chunked: bool | None) -> None:
        self.chunked = chunked

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        chunked = self.chunked
        if chunked is None:
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            tokens = config.train.micro_batch * config.data.pack_tokens // mesh.layout.sp
            chunked = isinstance(head, nn.Linear) and tokens * head.out_features > most_logits(mesh.device)
        self.view = "of_hidden" if chunked else "of_logits"


class CrossEntropy(AtHead):
    """Of the next token of the text; a mean over targets, by their weights."""

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0, chunked: bool | None = None) -> None:
        super().__init__(chunked)
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def of_logits(self, logits: torch.Tensor, batch: Local) -> torch.Tensor:
        return cross_entropy_sum(logits, batch.targets, batch.weights, self.label_smoothing, self.z_loss)

    def of_hidden(self, hidden: torch.Tensor, head: Logits, batch: Local) -> torch.Tensor:
        if head.linear is None:
            return self.of_logits(head(hidden), batch)
        how = (batch.targets, batch.weights, self.label_smoothing, self.z_loss)
        return linear_cross_entropy_sum(hidden, head.linear, *how)


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


def give_way(loss: Loss) -> bool:
    """Let a loss see logits that would rather see hidden states, if it can: the model has an odd head."""
    if not isinstance(loss, AtHead) or loss.chunked:
        return False
    loss.view = "of_logits"
    return True
