"""Process groups of the mesh: the set that each layout creates, and their backends on accelerators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omnizoo.config.schema import Config
from omnizoo.parallel import groups
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import Process, fake_process_group

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
# Layout -> sizes of the groups of rank 0, without the group of all ranks. Axes of size 1 share the group of one rank.
GROUPS_OF_EIGHT = {
    "fsdp": ({}, [1]),
    "replicas only": ({"dp_replicate": 8}, [1]),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 4}, [2, 4, 1]),
    "ulysses": ({"ulysses": 8}, [8, 1]),
    "ulysses and ring": ({"ulysses": 2, "ring": 2}, [2, 2, 4, 1]),
    "experts": ({"ep": 8}, [8, 1]),
    "experts in shards": ({"ep": 4}, [4, 2, 1]),
    "hsdp, ulysses and experts": ({"dp_replicate": 2, "ulysses": 2, "ep": 4}, [2, 2, 4, 4, 1]),
}


def mesh_of(parallel: dict[str, int], process: Process) -> Mesh:
    config: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"path": "rows.jsonl"}]},
        "parallel": parallel,
        "train": {"packs_per_step": process.world_size},
    }
    return build_mesh(Config.model_validate(config), process)


@contextmanager
def world_of(ranks: int, device: torch.device = CPU) -> Iterator[Process]:
    """A pretended world, seen from rank 0. On an accelerator, groups are split from the group of all ranks."""
    with fake_process_group(0, ranks, torch.device("meta")):
        yield Process(rank=0, world_size=ranks, local_rank=0, device=device)


def record_new_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """Return a list that receives the size and the backend of each new group of rank 0."""
    created: list[tuple[int, str | None]] = []
    new_group = dist.new_group

    def recording(ranks: list[int], backend: str | None = None, **kwargs: Any) -> Any:
        if 0 in ranks:
            created.append((len(ranks), backend))
        return new_group(ranks, **kwargs)

    def split_group(split_ranks: list[list[int]], backend: str | None = None, **kwargs: Any) -> Any:
        created.append((len(split_ranks[0]), backend))
        return new_group(split_ranks[0], **kwargs)

    monkeypatch.setattr(dist, "new_group", recording)
    monkeypatch.setattr(dist, "split_group", split_group)
    return created


@pytest.mark.parametrize("layout", GROUPS_OF_EIGHT)
@pytest.mark.parametrize("is_accelerator", [False, True])
def test_mesh_creates_one_group_per_set_of_ranks_that_communicates(
    monkeypatch: pytest.MonkeyPatch, layout: str, is_accelerator: bool
) -> None:
    parallel, sizes = GROUPS_OF_EIGHT[layout]
    created = record_new_groups(monkeypatch)
    monkeypatch.setattr(groups, "can_split", lambda *_: is_accelerator)
    monkeypatch.setattr("omnizoo.parallel.mesh.BACKENDS", {})  # no device to connect the ring on
    with world_of(8, CUDA if is_accelerator else CPU) as process:
        mesh_of(parallel, process)
    assert sorted(size for size, _ in created) == sorted(sizes)
    assert {backend for _, backend in created} <= {"cuda:nccl" if is_accelerator else None}


def test_mesh_with_known_axes_creates_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    created = record_new_groups(monkeypatch)
    with world_of(8) as process:
        first = mesh_of({"ulysses": 2, "ep": 4}, process)
        created.clear()
        second = mesh_of({"ulysses": 2, "ep": 4}, process)
        assert created == []
        assert second.experts is first.experts
        assert second.group("ulysses") is first.group("ulysses")


def test_axes_of_equal_ranks_share_a_group_unless_one_is_inside_blocks() -> None:
    with world_of(8) as process:
        mesh = mesh_of({"ulysses": 4}, process)
        assert mesh.group("sp") is mesh.group("ulysses")
        assert mesh.experts.get_group("ep_shard") is mesh.dense.get_group("shard") is mesh.world_group
        mesh = mesh_of({"ulysses": 8}, process)
        assert mesh.group("ulysses") is not mesh.world_group


@pytest.mark.parametrize(
    ("axis", "expected"), [("shard", [4, 5, 6, 7]), ("replicate", [1, 5]), ("ep", [4, 5]), ("ep_shard", [5, 7])]
)
def test_ranks_along_an_axis_differ_only_there(axis: str, expected: list[int]) -> None:
    dense = {"replicate": 2, "shard": 4}
    experts = {"replicate": 2, "ep_shard": 2, "ep": 2}
    sizes = dense if axis in dense else experts
    assert next(ranks for ranks in groups.ranks_along(axis, sizes) if 5 in ranks) == expected
