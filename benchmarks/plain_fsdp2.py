"""The loop OmniZoo is measured against: transformers, `fully_shard` and AdamW, written by hand for one model.

It has what a careful engineer would write and nothing more: no loader (it is handed packs that are ready), no schedule,
no check for non-finite losses, no metrics, no resume.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config


def build(config: Qwen3Config, attention: str, mesh: DeviceMesh) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.train()


def build_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.AdamW,
    input_ids: torch.Tensor,  # [1, T], samples one after the other
    position_ids: torch.Tensor,  # [1, T], from 0 in every sample: by them transformers keeps samples apart
    labels: torch.Tensor,  # [1, T], already shifted; -100 where there is no target
    boundaries: torch.Tensor | None = None,  # [samples + 1], for a kernel that wants to be told
) -> tuple[float, float]:
    """One optimizer step on one pack per rank; returns the loss over all ranks and the gradient norm."""
    count = (labels != -100).sum()
    dist.all_reduce(count)
    known = {} if boundaries is None else {"cu_seq_lens_q": boundaries, "max_length_q": int(boundaries.diff().max())}
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **known).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
    (loss * dist.get_world_size()).backward()  # FSDP averages over ranks, the loss is a sum over them
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item(), norm.full_tensor().item()
