"""Cross-entropy on text, and the base class of losses that use either logits or hidden states."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.schema import Config
from omnizoo.models.interfaces.lm_head import Logits
from omnizoo.ops.loss.cross_entropy import cross_entropy_sum
from omnizoo.ops.loss.linear_cross_entropy import linear_cross_entropy_sum, max_logits
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import Loss


class HeadLoss(Loss):
    """Base class of losses that use all logits or, if `chunked`, compute logits from hidden states chunk by chunk.

    By default, a loss is chunked if the head is linear and the logits of a micro-batch exceed a device-dependent limit.
    """

    def __init__(self, chunked: bool | None = None) -> None:
        self.chunked = chunked

    def set_up(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        chunked = self.chunked
        if chunked is None:
            head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
            tokens = config.train.micro_batch * config.data.pack_tokens // mesh.layout.sp
            limit = max_logits(mesh.device)
            chunked = isinstance(head, nn.Linear) and tokens * head.out_features > limit
        self.input_kind = "from_hidden" if chunked else "from_logits"  # read by `NamedLoss`


class CrossEntropy(HeadLoss):
    """Cross-entropy of the next text token, averaged over targets with their loss weights."""

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss

    def from_logits(self, logits: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        row_losses = batch.source_sums.buffer(logits)
        total = cross_entropy_sum(
            logits, batch.targets, batch.loss_weights, self.label_smoothing, self.z_loss, row_losses=row_losses
        )
        batch.split_by_source(total, row_losses)
        return total

    def from_hidden(self, hidden: torch.Tensor, head: Logits, batch: LocalBatch) -> torch.Tensor:
        if head.linear is None:
            return self.from_logits(head(hidden), batch)
        row_losses = batch.source_sums.buffer(hidden)
        total = linear_cross_entropy_sum(
            hidden,
            head.linear,
            batch.targets,
            batch.loss_weights,
            self.label_smoothing,
            self.z_loss,
            row_losses=row_losses,
        )
        batch.split_by_source(total, row_losses)
        return total


def fall_back_to_logits(loss: Loss) -> bool:
    """Switch a loss to full logits, for models whose head cannot be called separately.

    Returns:
        False if the loss requires hidden states, for example because its option `chunked` is set.
    """
    if not isinstance(loss, HeadLoss) or loss.chunked:
        return False
    loss.input_kind = "from_logits"
    return True
