"""Collectives made of messages between CPUs give what gloo's own give."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_on_ranks

from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.fsdp.cpu_collectives import DirectAllGather, DirectReduceScatter
from omnizoo.parallel.process import Process

RANKS, SIZE = 3, 1000


def exchange(process: Process, folder: Path) -> None:
    found = {}
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(process.rank)
        part, whole = torch.randn(SIZE).to(dtype), torch.randn(RANKS * SIZE).to(dtype)
        gathered, expected = torch.empty(RANKS * SIZE, dtype=dtype), torch.empty(RANKS * SIZE, dtype=dtype)
        with CollectiveCounter() as own:
            work = DirectAllGather()(gathered, part, group, async_op=True)
            assert work is not None
            work.wait()
        with CollectiveCounter() as theirs:
            dist.all_gather_single(expected, part)
        found[f"all-gather {dtype}"] = torch.equal(gathered, expected)
        in_place = expected.clone()
        in_place[: process.rank * SIZE] = in_place[(process.rank + 1) * SIZE :] = 0
        DirectAllGather()(in_place, in_place[process.rank * SIZE :][:SIZE], group)
        found[f"in place {dtype}"] = torch.equal(in_place, expected)

        reduced = torch.empty(SIZE, dtype=dtype)
        given = whole.clone()
        with own:
            DirectReduceScatter()(reduced, given, group, dist.ReduceOp.SUM)
        everyone = [torch.empty_like(whole) for _ in range(RANKS)]
        dist.all_gather(everyone, whole)
        with theirs:
            dist.reduce_scatter_single(torch.empty(SIZE, dtype=dtype), whole.clone())
        total = everyone[0] + everyone[1] + everyone[2]
        found[f"reduce-scatter {dtype}"] = torch.equal(reduced, total[process.rank * SIZE :][:SIZE])
        found[f"what goes in stays {dtype}"] = torch.equal(given, whole)
        found[f"counted as one collective {dtype}"] = (own.calls, own.bytes) == (theirs.calls, theirs.bytes)
    (folder / f"{process.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_cpu_collectives_match_gloo(tmp_path: Path) -> None:
    result = run_on_ranks(exchange, RANKS, tmp_path)
    assert result.code == 0, result.stderr
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 15
        assert [name for name, good in found.items() if not good] == []
