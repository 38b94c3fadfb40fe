"""Faults for tests/verification/test_verify.py: each is injected on every rank, and `verify` must detect it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process
from omnizoo.verification.compare import try_layout

Fault = Callable[[], Any]


@contextmanager
def wrong_divide_factor_on_experts() -> Iterator[None]:
    from omnizoo.parallelize import shard_units

    original = shard_units.shard_experts

    def shard_experts(modules: Any, *args: Any) -> Any:
        units = original(modules, *args)
        for module in modules:
            module.set_gradient_divide_factor(2.0)
            module.set_force_sum_reduction_for_comms(True)
        return units

    with patch.object(shard_units, "shard_experts", shard_experts):
        yield


@contextmanager
def positions_not_sliced() -> Iterator[None]:
    from omnizoo.training import objective

    original = objective.localize

    def localize(batch: Any, *args: Any, **options: Any) -> Any:
        local = original(batch, *args, **options)
        tokens = local.inputs["input_ids"].shape[1]
        return replace(local, inputs=local.inputs | {"position_ids": batch.columns["position_ids"][:, :tokens]})

    with patch.object(objective, "localize", localize):
        yield


@contextmanager
def packed_samples_see_each_other() -> Iterator[None]:
    from omnizoo.training import objective

    original = objective.localize

    def localize(batch: Any, *args: Any, **options: Any) -> Any:
        one_sample = torch.tensor([0, batch.tokens], dtype=torch.int32)
        return original(replace(batch, cu_seqlens=one_sample, max_seqlen=batch.tokens), *args, **options)

    with patch.object(objective, "localize", localize):
        yield


@contextmanager
def balance_loss_per_rank() -> Iterator[None]:
    from omnizoo.training.losses import routers

    original = routers.balance_sum
    with patch.object(
        routers, "balance_sum", lambda records, packs, n, add_up: original(records, packs, n, lambda load: load)
    ):
        yield


@contextmanager
def key_value_heads_repeated_wrongly() -> Iterator[None]:
    from omnizoo.parallel.sequence import sequence_parallel

    original = sequence_parallel.SequenceParallel.__call__

    def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: Any) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        return original(self, query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), pattern)

    with patch.object(sequence_parallel.SequenceParallel, "__call__", attend):
        yield


@contextmanager
def every_float_cast_on_entry() -> Iterator[None]:
    """Cast all float inputs, as FSDP2 does by default. Not in FAULTS, because it only affects bf16."""
    from omnizoo.parallelize import shard_units

    original = shard_units.precision_policy
    with patch.object(shard_units, "precision_policy", lambda name: replace(original(name), cast_forward_inputs=True)):
        yield


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        wrong_divide_factor_on_experts,
        positions_not_sliced,
        packed_samples_see_each_other,
        balance_loss_per_rank,
        key_value_heads_repeated_wrongly,
    )
}


def try_with_cast(process: Process, folder: Path, layout: Layout) -> None:
    with every_float_cast_on_entry():
        try_layout(process, folder, layout)


def try_with_fault(process: Process, folder: Path, layout: Layout, fault: str) -> None:
    with FAULTS[fault]():
        try_layout(process, folder, layout)
