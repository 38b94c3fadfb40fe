"""Shared pieces of parallel/test_experts.py and other tests."""

import os
from collections.abc import Callable

import torch.multiprocessing as mp


def start_four(worker: Callable[..., None], *args: object) -> None:
    """Real processes, forked from a server that has imported everything once."""
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(worker, args, nprocs=4, start_method="forkserver")
