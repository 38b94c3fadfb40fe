"""Weights on their way in and out: what a run would start from, and the logits of what it has trained."""

from pathlib import Path
from typing import Any

import torch
from processes import train_in_this_world
from torch.distributed.tensor import DTensor

from omnizoo.config.load import load_config
from omnizoo.models.build import build_model
from omnizoo.models.hf_private import expert_modules
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training import saving

PROBE = torch.arange(40).view(2, 20) * 7 % 512


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=PROBE, use_cache=False).logits


def gives(model: Any, logits: torch.Tensor) -> bool:
    """Whether they are the model's, bit for bit. Experts are computed as in training for that; as transformers computes
    them, which weighs what they give and not what they give it from, logits are the same to rounding.
    """
    if expert_modules(model):
        assert float((logits_of(model) - logits).norm() / logits.norm()) <= 1e-5
        use_dispatched(model)
    return torch.equal(logits_of(model), logits)


def train_and_keep_logits(args: list[object]) -> torch.Tensor:
    """Train to the end; the logits of the trained model, taken when it is saved, with transformers' own attention."""
    return train_and_keep(args)[0]


def train_and_keep(args: list[object]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same, and the trained model's whole weights."""
    kept, save = [], saving.save_checkpoint

    def spy(directory: Path, step: int, model: Any, *rest: Any) -> Path:
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        kept.append((logits_of(model), whole(model.state_dict())))
        model.set_attn_implementation(before)
        return save(directory, step, model, *rest)

    saving.save_checkpoint = spy
    try:
        assert train_in_this_world(args) == 0
    finally:
        saving.save_checkpoint = save
    return kept[-1]


def load(process: Process, path: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """Whole parameters of the model that a run of this config would start from."""
    config = load_config(path, list(overrides))
    model = build_model(config.model, config.train.precision)
    parallelize_model(model, build_mesh(config, process), config)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return whole(dict(model.named_parameters()))


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors of which ranks have parts; all ranks must call."""
    found = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}
