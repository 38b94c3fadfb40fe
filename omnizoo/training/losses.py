"""Loss terms: everything a model is trained on has the shape (name, weight, sum, count).

Counts are known from the data before the forward pass and summed over all ranks and micro-batches of the step, so each
term is a plain mean over the whole step, whatever the layout.
"""

from dataclasses import dataclass

import torch
from torch import nn

from omnizoo.data.loader import Batch
from omnizoo.ops.cross_entropy import cross_entropy_sum


@dataclass(frozen=True)
class LossTerm:
    name: str
    weight: float
    sum: torch.Tensor  # over this micro-batch on this rank, with its graph
    count: int  # what `sum` runs over, same scope


def loss_terms(model: nn.Module, batch: Batch) -> list[LossTerm]:
    """Forward one packed micro-batch. Logits are made only where there is a target."""
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        # A cache, or any 2-D attention mask, would silently switch off the isolation of packed samples.
        use_cache=False,
        logits_to_keep=batch.target_index,
        cu_seq_lens_q=batch.cu_seqlens,
        cu_seq_lens_k=batch.cu_seqlens,
        max_length_q=batch.max_seqlen,
        max_length_k=batch.max_seqlen,
    ).logits
    total = cross_entropy_sum(logits[0], batch.labels[0, batch.target_index])
    return [LossTerm("text", 1.0, total, batch.targets)]
