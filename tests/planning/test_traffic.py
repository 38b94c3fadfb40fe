"""A plan attributes each collective to a mesh axis, also if several axes have the same ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from omnizoo.config.errors import UserError
from omnizoo.ops.torch_private import replaced
from omnizoo.parallel.traffic_tag import sent_along, tagged_axes
from omnizoo.planning.traffic import Traffic

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


def send(*axes_of_group: str, device: torch.device = DEVICE) -> str:
    """Return the axis that an all-reduce is attributed to, on ranks that all these axes share."""
    mesh: Any = SimpleNamespace(rank=0, device=DEVICE, axes_of=lambda _: list(axes_of_group))
    group: Any = None
    traffic = Traffic(mesh, per_node=8)
    with replaced((dist, "get_process_group_ranks", lambda _: [0, 1])):
        traffic.add("all-reduce", group, device, 4)
    (collective,) = traffic.calls
    return collective.axis


def test_collective_on_one_axis_needs_no_tag() -> None:
    assert send("ring") == "ring"


def test_untagged_collective_on_several_axes_raises() -> None:
    with pytest.raises(UserError, match=r"^plan: all-reduce .*shard, world"):
        send("shard", "world")


def test_tag_of_another_axis_raises() -> None:
    with sent_along("ring"), pytest.raises(UserError, match=r"^plan: all-reduce"):
        send("shard", "world")


def test_innermost_tag_applies() -> None:
    with sent_along("world"):
        with sent_along("replicate", "shard"):
            assert send("shard", "world") == "shard"
        assert send("shard", "world") == "world"
    assert tagged_axes() == ()


def test_tag_ends_when_an_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), sent_along("world"):
        _ = 1 / 0
    assert tagged_axes() == ()


def test_cpu_collectives_are_on_the_world_axis() -> None:
    assert send("shard", "world", device=CPU) == "world"


def test_experts_without_ep_are_sharded_like_dense_weights() -> None:
    with sent_along("ep_shard"):
        assert send("shard", "ep_shard") == "shard"
        assert send("ep_shard", "dp_shard") == "ep_shard"
