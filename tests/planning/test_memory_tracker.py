"""The memory tracker of dry runs."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from omnizoo.planning.memory_tracker import MemoryTracker

COUNT = 100  # tensors that only garbage collection can free


@pytest.fixture
def tracker() -> Iterator[MemoryTracker]:
    """Return a tracker of tensors in reference cycles. Garbage collection is disabled until the test enables it."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    tracker = MemoryTracker(torch.device("cpu"), rounded=False)
    with tracker.watching():
        for _ in range(COUNT):
            cycle: list[object] = [torch.zeros(256)]
            cycle.append(cycle)
        del cycle
    yield tracker
    gc.set_threshold(*thresholds)
    gc.enable()


def test_peak_is_right_while_garbage_collection_frees_tensors(
    tracker: MemoryTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = np.zeros

    def zeros_and_collect(*args: Any) -> Any:
        array = zeros(*args)
        gc.collect()
        return array

    monkeypatch.setattr(np, "zeros", zeros_and_collect)
    assert tracker.peak().bytes == COUNT * 1024


def test_step_begins_while_garbage_collection_frees_tensors(tracker: MemoryTracker) -> None:
    gc.set_threshold(COUNT // 2, 1, 1)  # runs while the live allocations are listed
    gc.enable()
    tracker.begin_step()
    gc.collect()
    assert tracker.timeline().bytes.sum(0)[-1] == 0
