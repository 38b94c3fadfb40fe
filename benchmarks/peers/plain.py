"""A loop without a framework: FSDP2, the same Hugging Face model and the same documents in packs.

    [torchrun] plain.py ASSETS MODEL [--tuned [--reshard]] [--steps 20]

The default is a simple implementation: a block mask over the pack, full logits, weights resharded after each block.
`--tuned` is the implementation of an expert: one attention call per document, head and loss in chunks, weights kept
gathered (unless `--reshard` is set).
"""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

IGNORE, ROWS = -100, 256
bounds: list[tuple[int, int]] = []  # (first, end) of each document in the current pack


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, in chunks of rows. Gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = (labels != IGNORE).sum()
        hidden_grad, weight_grad, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for first in range(0, len(hidden), ROWS):
            rows = hidden[first : first + ROWS]
            chunk_labels = labels[first : first + ROWS]
            is_target = chunk_labels != IGNORE
            index = torch.where(is_target, chunk_labels, 0)[:, None]
            logits = rows @ weight.t()
            lse = logits.logsumexp(1)
            total += ((lse - logits.gather(1, index)[:, 0]) * is_target).sum()
            grad = logits.sub_(lse[:, None]).exp_()
            grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype)).mul_((is_target / count)[:, None])
            hidden_grad[first : first + ROWS] = grad @ weight
            weight_grad.addmm_(grad.t(), rows)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad.mul_(grad), weight_grad.mul_(grad), None


class WithLoss(nn.Module):
    """The model with its loss; `forward` returns the mean cross entropy."""

    def __init__(self, model: PreTrainedModel, tuned: bool) -> None:
        super().__init__()
        self.model, self.tuned = model, tuned

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, **mask: Any) -> torch.Tensor:
        body, head = self.model.model, self.model.lm_head
        hidden = body(input_ids=ids, position_ids=positions, use_cache=False, **mask).last_hidden_state.flatten(0, 1)
        if self.tuned:
            return ChunkedLoss.apply(hidden, head.weight, labels.flatten())
        return F.cross_entropy(head(hidden), labels.flatten(), ignore_index=IGNORE)


def per_document(_: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **kw: Any) -> Any:
    """Attend within each document, with one call per document."""
    outputs = [
        F.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in bounds
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


def packs(folder: Path, tokenizer: Any, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and positions of packs, endlessly: concatenated documents of this rank, split at the end of a pack."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    ids: list[int] = []
    positions: list[int] = []
    while True:
        for number, line in enumerate((folder / "text.jsonl").read_text().splitlines()):
            if number % world != rank:
                continue
            document = [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
            while document:
                room = tokens - len(ids)
                ids += document[:room]
                positions += range(min(room, len(document)))
                document = document[room:]
                if len(ids) == tokens:
                    yield torch.tensor([ids]), torch.tensor([positions])
                    ids, positions = [], []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assets", type=Path, help="folder with models and data")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("--tuned", action="store_true", help="use the implementation of an expert")
    parser.add_argument("--reshard", action="store_true", help="with --tuned: reshard weights after each block")
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a pack (default: 1024)")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    folder = args.assets / args.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    if args.tuned:
        AttentionInterface.register("per_document", per_document)
        AttentionMaskInterface.register("per_document", lambda *_, **__: None)
        model.set_attn_implementation("per_document")
    root = WithLoss(model, args.tuned)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        reshard = args.reshard or not args.tuned
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(root, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for step, (ids, positions) in zip(range(args.steps), packs(folder, tokenizer, args.tokens), strict=False):
        labels = torch.full_like(ids, IGNORE)
        labels[:, :-1] = ids[:, 1:].masked_fill(positions[:, 1:] == 0, IGNORE)
        mask = {}
        if args.tuned:
            starts = [*(positions[0] == 0).nonzero().flatten().tolist(), args.tokens]
            bounds[:] = pairwise(starts)
        else:
            document = (positions == 0).cumsum(1)
            same = document[:, None, :, None] == document[:, None, None, :]
            mask["attention_mask"] = same & torch.ones(args.tokens, args.tokens, dtype=torch.bool).tril()
        loss = root(ids, positions, labels, **mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(root.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
