"""Record the outputs of MoE routers during a forward pass, with hooks that are otherwise inactive."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.models.hf_private import routers
from omnizoo.ops.compiled_blocks import graph_break


@dataclass(frozen=True)
class RouterRecord:
    """The output of one router in a forward pass."""

    layer: str  # name of the router module
    logits: torch.Tensor  # [tokens, experts], with their autograd graph
    index: torch.Tensor  # [tokens, experts per token], indices of the chosen experts


class RouterRecorder:
    """Recorder of router outputs. Create one per model, before or after sharding; `routers` is empty for a dense model.

    A router that does not return its chosen experts cannot be recorded. This is an error if `required`, because a loss
    or bias depends on it. Otherwise, its layer has no records. `without` lists modules to skip, because their routers
    do not process the tokens of packs.
    """

    def __init__(self, model: nn.Module, required: bool, without: Collection[str] = ()) -> None:
        self._required = required
        self._records: list[RouterRecord] | None = None
        excluded = tuple(f"{name}." for name in without)
        self.routers: dict[str, nn.Module] = {}
        for name, (module, logits_index) in routers(model).items():
            if not name.startswith(excluded):
                self.routers[name] = module
                module.register_forward_hook(partial(self._record, name, logits_index))

    @contextmanager
    def recording(self) -> Iterator[list[RouterRecord]]:
        """Context manager that records the forward pass. Recomputation in backward is not recorded again."""
        records: list[RouterRecord] = []
        self._records = records
        try:
            yield records
        finally:
            self._records = None

    @graph_break
    def _record(self, name: str, logits_index: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Forward hook of the router `name`. The only integer tensor in its outputs contains the chosen experts."""
        if self._records is None:
            return
        indices = [out for out in outputs if isinstance(out, torch.Tensor) and not out.is_floating_point()]
        if len(indices) != 1:
            if self._required:
                raise UserError(
                    f"model: router {name} ({type(module).__name__}) does not return the experts it chose, which "
                    "router losses (balance, router_z) and train.router_bias_rate need. Remove them from the config."
                )
            return
        logits = outputs[logits_index].flatten(0, -2)
        self._records.append(RouterRecord(name, logits, indices[0].flatten(0, -2)))


def correction_bias(router: nn.Module) -> torch.Tensor | None:
    """Return the buffer that routers with loss-free balancing add to their scores before top-k, or None."""
    bias: torch.Tensor | None = getattr(router, "e_score_correction_bias", None)
    return bias
