"""The order of work on streams in whole training steps: every wait that an accelerator needs is there.

The steps run on CPUs with stand-in streams and with torch's own collectives, as on an accelerator. Each case checks the
real `train_step`; the planted defects show what the checker finds.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from streams import AsyncWork, Stream, StreamChecker
from tiny import model_config, write_config
from torch.distributed.fsdp import FSDPModule

import omnizoo
from omnizoo.ops import torch_private
from omnizoo.ops.memory import offload
from omnizoo.ops.memory.offload import DeviceCopy, HostBuffers
from omnizoo.ops.torch_private import Replacement, replaced
from omnizoo.parallel.fsdp import shard
from omnizoo.parallel.process import Process, process_group

STEPS = 2
# Accelerators reduce the gradients of each micro-batch by default.
BF16 = {"train.precision": "bf16", "parallel.reduce_each_micro_batch": True}
OFFLOADED = BF16 | {"parallel.offload": ["activations", "optimizer"]}
# Settings of runs, by name, for one and for two ranks.
ON_ONE_RANK: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16, one reduction per step": {"train.precision": "bf16"},
    "recompute": BF16 | {"parallel.recompute": "full"},
    "offload": OFFLOADED,
    "offload of parameters": BF16 | {"parallel.offload": ["activations", "parameters"]},
    "offload and recompute": OFFLOADED | {"parallel.recompute": "selective"},
}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "fsdp": BF16,
    "fsdp without reshard": BF16 | {"parallel.reshard_after_forward": False},
    "hsdp": BF16 | {"parallel.dp_replicate": 2},
    "experts": BF16 | {"parallel.ep": 2, "model.config": model_config("gpt_oss")},
    "ulysses": BF16 | {"parallel.ulysses": 2, "parallel.recompute": "selective"},
    "ring": BF16 | {"parallel.ring": 2, "parallel.recompute": "full"},
    "offload": OFFLOADED,
    "offload of parameters": BF16 | {"parallel.offload": ["parameters"]},
}


# Offload and FSDP2 take the code paths of an accelerator: copies on side streams, collectives of torch.
LIKE_AN_ACCELERATOR: list[Replacement] = [
    (offload, "is_host", lambda _: False),
    (offload, "MIN_BYTES", 0),
    (shard, "set_collectives", lambda *_: None),
]


def races_of_steps(
    folder: Path, process: Process, settings: dict[str, Any], planted: Sequence[Replacement] = ()
) -> list[str]:
    """Return the races in two steps with at least three micro-batches on each data-parallel rank."""
    overrides = [word for key, value in settings.items() for word in (f"--{key}", json.dumps(value))]
    config = omnizoo.load_config(folder / "tiny.yaml", overrides)
    checker = StreamChecker()
    with replaced(*LIKE_AN_ACCELERATOR, *planted):
        mesh = omnizoo.build_mesh(config, process)
        tokenizer = omnizoo.load_tokenizer(config.model)
        model = omnizoo.build_model(config.model, config.train.precision)
        media = omnizoo.read_modalities(model, config.model)
        loader = omnizoo.build_loader(config, tokenizer, mesh.rank, mesh.layout.world, **media)
        omnizoo.parallelize_model(model, mesh, config)
        optimizer = omnizoo.build_optimizer(model, config)
        balancer = omnizoo.Balancer(model, mesh, config)
        objective = omnizoo.build_objective(model, mesh, config)
        data = [omnizoo.next_step(loader, balancer) for _ in range(STEPS)]
        with checker.watching():
            for step, step_data in enumerate(data, start=1):
                result = omnizoo.train_step(objective, optimizer, step_data, step)
                assert result.finite
    return checker.races


# ---- planted defects: each removes one wait, and a step with it must be reported


def wait_for_nothing(*_: Any) -> None:
    """Stand for a missing wait."""


def put_back_at_once(_: Any, host_tensor: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy to the device without a wait for the copy to the host."""
    tensor.copy_(host_tensor, non_blocking=True)


def refill_without_record(host: Any, host_tensor: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy to the host, and let the allocator reuse the memory of `tensor` before the copy is complete."""
    with host._side_stream():
        host_tensor.copy_(tensor, non_blocking=True)


class SharedBuffer:
    """A reduce-scatter whose input and output are one buffer."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = self._buffer = torch.empty(*size, dtype=dtype, device=device)
        return buffer


def share_buffers(unit: FSDPModule, _: Any) -> None:
    unit.set_custom_reduce_scatter(SharedBuffer())  # type: ignore[arg-type]


Planted = tuple[dict[str, Any], list[Replacement]]  # settings of the run, and what to replace
PLANTED_ON_ONE_RANK: dict[str, Planted] = {
    "state is used before it is on the device": (OFFLOADED, [(HostBuffers, "put_back", put_back_at_once)]),
    "activations are used before they are on the device": (OFFLOADED, [(DeviceCopy, "wait", wait_for_nothing)]),
    "memory is reused before it is copied": (OFFLOADED, [(HostBuffers, "refill", refill_without_record)]),
    "gradients accumulate in the buffer of their reduction": (
        BF16,
        [(shard, "set_collectives", share_buffers), (torch_private, "_stays_on_compute_stream", lambda _: False)],
    ),
}
PLANTED_ON_TWO_RANKS: dict[str, Planted] = {
    "no stream waits for an event": (ON_TWO_RANKS["fsdp"], [(Stream, "wait_event", wait_for_nothing)]),
    "no stream waits for another one": (ON_TWO_RANKS["fsdp"], [(Stream, "wait_stream", wait_for_nothing)]),
    "heads are used before they are received": (ON_TWO_RANKS["ulysses"], [(AsyncWork, "wait", wait_for_nothing)]),
    "keys are used before they are received": (ON_TWO_RANKS["ring"], [(AsyncWork, "wait", wait_for_nothing)]),
}


def races_with_defect(folder: Path, process: Process, planted: Planted) -> list[str]:
    settings, replacements = planted
    return races_of_steps(folder, process, settings, replacements)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_config(folder, train={"packs_per_step": 6, "steps": STEPS})
    return folder


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with process_group((0, 1, 0)) as process:
        yield process


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_steps_of_one_rank_have_no_race(folder: Path, process: Process, name: str) -> None:
    assert races_of_steps(folder, process, ON_ONE_RANK[name]) == []


@pytest.mark.parametrize("name", PLANTED_ON_ONE_RANK)
def test_planted_race_on_one_rank_is_found(folder: Path, process: Process, name: str) -> None:
    assert races_with_defect(folder, process, PLANTED_ON_ONE_RANK[name])


def run_cases(process: Process, folder: Path) -> None:
    races = {name: races_of_steps(folder, process, settings) for name, settings in ON_TWO_RANKS.items()}
    races |= {name: races_with_defect(folder, process, planted) for name, planted in PLANTED_ON_TWO_RANKS.items()}
    (folder / f"{process.rank}.json").write_text(json.dumps(races))


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path) -> list[dict[str, list[str]]]:
    result = run_on_ranks(run_cases, 2, folder)
    assert result.code == 0, result.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_steps_of_two_ranks_have_no_race(on_two_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [races[name] for races in on_two_ranks] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED_ON_TWO_RANKS)
def test_planted_race_on_two_ranks_is_found(on_two_ranks: list[dict[str, list[str]]], name: str) -> None:
    assert all(races[name] for races in on_two_ranks)
