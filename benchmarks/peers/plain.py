"""No framework: a bare loop with FSDP2, the same Hugging Face model, the same documents in packs.

    [torchrun] plain.py ASSETS MODEL [--tuned [--reshard]] [--steps 20]

As most people would write it: a block mask over the pack, all logits at once, weights resharded after each block.
`--tuned` is what an expert would make of it: one attention call per document, the head and its loss in chunks, weights
kept gathered; with `--reshard` they are not.
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
bounds: list[tuple[int, int]] = []  # of the documents in the pack that is computed


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, some rows at a time; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = (labels != IGNORE).sum()
        to_hidden, to_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for first in range(0, len(hidden), ROWS):
            rows, wanted = hidden[first : first + ROWS], labels[first : first + ROWS]
            learnt = wanted != IGNORE
            index = torch.where(learnt, wanted, 0)[:, None]
            logits = rows @ weight.t()
            lse = logits.logsumexp(1)
            total += ((lse - logits.gather(1, index)[:, 0]) * learnt).sum()
            grad = logits.sub_(lse[:, None]).exp_()
            grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype)).mul_((learnt / count)[:, None])
            to_hidden[first : first + ROWS] = grad @ weight
            to_weight.addmm_(grad.t(), rows)
        ctx.save_for_backward(to_hidden, to_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden.mul_(grad), to_weight.mul_(grad), None


class WithLoss(nn.Module):
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
    each = [
        F.scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in bounds
    ]
    return torch.cat(each, 2).transpose(1, 2), None


def packs(folder: Path, tokenizer: Any, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Documents end to end, cut at the end of a pack; this rank's share of them, again and again."""
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
    parser.add_argument("assets", type=Path)
    parser.add_argument("model")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
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
