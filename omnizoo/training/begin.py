"""How a run begins, once it is known what it is of: shards, weights, optimizer, and what a checkpoint has of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.assembly.adapters import adapter_record
from omnizoo.assembly.parallelize import parallelize
from omnizoo.checkpoint.save import load
from omnizoo.checkpoint.start import Origin, find
from omnizoo.config.schema import Config
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh
from omnizoo.training.optimizer import build_optimizer, check_optimizer
from omnizoo.training.schedule import learning_rate


@dataclass(frozen=True)
class Begun:
    origin: Origin
    adapter: dict[str, Any] | None  # what a checkpoint tells of the adapter; None without one
    optimizer: torch.optim.Optimizer
    state: dict[str, Any]  # of the checkpoint that the run goes on from; empty: it begins

    def saved(self) -> dict[str, Any]:
        """What every checkpoint of the run tells of it."""
        return {"run": self.origin.run} | ({} if self.adapter is None else {"adapter": self.adapter})


def check_parts(config: Config) -> None:
    """Parts of the user's own may be a mistake, which is told before anything is loaded."""
    check_optimizer(config)
    learning_rate(config.train, 1)


def begin(
    model: nn.Module, mesh: Mesh, config: Config, directory: Path, done: Callable[[str], None] = lambda _: None
) -> Begun:
    """Give `model` (on meta) its shards and weights: those of the newest checkpoint in `directory`, or of
    `checkpoint.resume`, if there is one. `done` is told of each part when it is over."""
    origin = find(config, directory, mesh)
    adapter = mesh.from_first(agree(mesh, lambda: adapter_record(model, config) if mesh.is_first else None))
    loads = origin.checkpoint is None or adapter is not None
    agree(mesh, lambda: parallelize(model, mesh, config, load=loads, done=done))
    optimizer = agree(mesh, lambda: build_optimizer(model, config))
    model.train()
    done("optimizer")
    state = load(origin, model, optimizer, adapter and adapter["base"])
    done("weights")  # of a checkpoint, with the optimizer's state
    return Begun(origin, adapter, optimizer, state)
