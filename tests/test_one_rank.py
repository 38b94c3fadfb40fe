"""A rank that has a unit of FSDP2 for itself computes with its shards: no copy of weights, none of gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from omnizoo.parallel.process import process_group
from omnizoo.parallel.shard import move, set_communication


@pytest.fixture
def mesh() -> Iterator[Any]:
    with process_group((0, 1, 0)):
        yield torch.distributed.init_device_mesh("cpu", (1,))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def where(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_the_shards_and_numbers_those_of_plain_torch(mesh: Any, reshard: bool) -> None:
    own, plain = network(), network()
    for module in (own[0], own[2], own):
        set_communication(fully_shard(module, mesh=mesh, reshard_after_forward=reshard), mesh)
    move(own, torch.device("cpu"))
    shards = {name: where(p) for name, p in own.named_parameters()}
    seen: list[int] = []
    own[0].register_forward_hook(lambda module, *_: seen.append(where(module.weight)), prepend=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (own, plain)]
    for step in range(3):
        for each, optimizer in zip((own, plain), optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(2):  # micro-batches
                if each is own:
                    own.set_requires_gradient_sync(step == 0 or part == 1)
                torch.manual_seed(step + 10 * part)
                each(torch.randn(5, 6, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        for (name, p), other in zip(own.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert isinstance(p.grad, DTensor)
            assert where(p) == shards[name]
            assert torch.equal(p.grad.full_tensor(), other.grad)
            assert torch.equal(p.full_tensor(), other)
    assert set(seen) == {shards["0.weight"]}


def test_weights_that_are_cast_are_copies_as_ever(mesh: Any) -> None:
    own = network().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    set_communication(fully_shard(own, mesh=mesh, mp_policy=policy), mesh)
    own(torch.randn(5, 6)).float().sum().backward()
    for p in own.parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert p.grad.full_tensor().isfinite().all()
