"""A rank that has a unit of FSDP2 for itself computes with its shards: no copy of weights, none of gradients."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks
from streams import StreamChecker
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from omnizoo.ops import torch_private
from omnizoo.parallel.fsdp.fill import move
from omnizoo.parallel.fsdp.shard import make_unit, offload_policy, precision_policy, set_gradient_sync
from omnizoo.parallel.process import Process, process_group

MICRO_BATCHES = 3
CPU = torch.device("cpu")


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
def test_one_rank_uses_shards_without_copies_and_matches_plain_torch(mesh: Any, reshard: bool) -> None:
    own, plain = network(), network()
    for module in (own[0], own[2], own):
        make_unit(module, mesh, reshard_after_forward=reshard)
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


def test_cast_weights_are_copied(mesh: Any) -> None:
    own = network().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    make_unit(own, mesh, mp_policy=policy)
    own(torch.randn(5, 6)).float().sum().backward()
    for p in own.parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert p.grad.full_tensor().isfinite().all()


def shard_in_bf16(model: Any, dense: DeviceMesh, experts: DeviceMesh, on_host: bool = False) -> None:
    """fp32 weights that compute in bf16. The last layer stands for experts, which have a mesh of their own."""
    policies = {"mp_policy": precision_policy("bf16"), "offload_policy": offload_policy(CPU, on_host)}
    for module, mesh in ((model[0], dense), (model[2], experts), (model, dense)):
        make_unit(module, mesh, **policies)
    move(model, CPU)


def inputs(rank: int, step: int) -> list[torch.Tensor]:
    torch.manual_seed(100 * rank + step)
    return [torch.randn(5, 6).bfloat16() for _ in range(MICRO_BATCHES)]


def accumulate(model: Any, batches: Sequence[torch.Tensor], reduce_each: bool) -> None:
    model.zero_grad()
    for number, batch in enumerate(batches, start=1):
        set_gradient_sync(model, last=number == len(batches), reduce_each=reduce_each)
        model(batch).float().square().sum().backward()


def plain_gradients(model: nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Plain torch on one process: bf16 copies of the weights, gradients summed in fp32."""
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches:
        copies = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
        out = torch.func.functional_call(model, copies, (batch,))
        grads = torch.autograd.grad(out.float().square().sum(), list(copies.values()))
        for total, grad in zip(totals, grads, strict=True):
            total += grad.float()
    return totals


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("reduce_each", [False, True])
@pytest.mark.parametrize("count", [1, MICRO_BATCHES])
def test_bf16_gradients_of_one_rank_match_plain_torch(mesh: Any, count: int, reduce_each: bool, on_host: bool) -> None:
    model, plain = network().float(), network().float()
    shard_in_bf16(model, mesh, mesh, on_host)
    for step in range(2):
        batches = inputs(0, step)[:count]
        accumulate(model, batches, reduce_each)
        for parameter, expected in zip(model.parameters(), plain_gradients(plain, batches), strict=True):
            assert isinstance(parameter.grad, DTensor)
            assert torch.equal(parameter.grad.full_tensor(), expected)


def accumulate_on_two_ranks(process: Process, folder: Path) -> None:
    grid = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "alone"))
    meshes = {"hsdp": (grid, grid), "experts": (grid["other"], grid["alone"])}
    is_equal: dict[str, bool] = {}
    for name, (dense, experts) in meshes.items():
        for reduce_each in (False, True):
            model, plain = network().float(), network().float()
            shard_in_bf16(model, dense, experts)
            accumulate(model, inputs(process.rank, 0), reduce_each)
            by_rank = [plain_gradients(plain, inputs(rank, 0)) for rank in range(2)]
            for (key, parameter), first, second in zip(model.named_parameters(), *by_rank, strict=True):
                is_local = name == "experts" and key.startswith("2.")
                expected = by_rank[process.rank][list(dict(plain.named_parameters())).index(key)]
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                is_equal[f"{name} {key} {reduce_each}"] = torch.equal(grad, expected if is_local else first + second)
    (folder / f"{process.rank}.json").write_text(json.dumps(is_equal))


@pytest.mark.slow
def test_bf16_gradients_of_hsdp_and_experts_match_plain_torch(tmp_path: Path) -> None:
    result = run_on_ranks(accumulate_on_two_ranks, 2, tmp_path)
    assert result.code == 0, result.stderr
    for rank in range(2):
        is_equal = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(is_equal) == 16
        assert [name for name, equal in is_equal.items() if not equal] == []


class SharedBuffer:
    """A reduce-scatter whose input and output are one buffer: the defect that the checker must find."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = self._buffer = torch.empty(*size, dtype=dtype, device=device)
        return buffer


def races_of(mesh: Any, shared: bool = False) -> list[str]:
    model: Any = network().float()
    shard_in_bf16(model, mesh, mesh)
    if shared:
        for module in (model[0], model[2], model):
            module.set_custom_reduce_scatter(SharedBuffer())
    checker = StreamChecker()
    with checker.watching():
        for step in range(2):
            accumulate(model, inputs(0, step), reduce_each=True)
    return checker.races


def test_gradients_of_one_rank_accumulate_without_stream_race(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert races_of(mesh) == []
    # As for weights on the host of an accelerator: torch accumulates on its reduce-scatter stream.
    monkeypatch.setattr(torch_private, "_stays_on_compute_stream", lambda _: False)
    assert races_of(mesh) == []
    assert races_of(mesh, shared=True)
