"""Adapter matrices of fused experts: separate for each expert, or shared by all experts of a layer.

Targets are parameters `[experts, ...]` of the experts, or `gate_proj` and `up_proj` where one parameter `gate_up_proj`
contains both. Separate matrices are parameters `[experts, rank, width]` of the experts, so expert parallelism splits
them. Shared matrices belong to a child module of the experts, which is sharded like dense weights.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from omnizoo.config.sections.model import AdapterSettings
from omnizoo.ops.experts import AddedRows, ExpertAdapter, GateUpAdapter

GATE_UP = "gate_up_proj"
HALVES = ("gate_proj", "up_proj")  # parts of `gate_up_proj`, in this order
OFF = "_omnizoo_adapter_off"  # attribute of a module with adapter matrices while they are disabled
SCALINGS = "_omnizoo_adapter_scalings"  # attribute of experts: factor of each target


def expert_targets(module: nn.Module) -> list[str]:
    """Return the names of the possible targets in fused experts, in the order of the module."""
    names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    return names + list(HALVES) if GATE_UP in names else names


def stored_in(target: str, module: nn.Module) -> str:
    """Return the name of the parameter that contains a target, both as names in the experts `module`."""
    return target if hasattr(module, target) else GATE_UP


def factor_names(target: str) -> tuple[str, str]:
    """Return the names of the separate matrices of a target, in the same module."""
    return f"{target}_lora_A", f"{target}_lora_B"


def shared_names(target: str) -> tuple[str, str]:
    """Return the names of the shared matrices of a target, relative to the experts."""
    return f"{target}_lora_shared.A", f"{target}_lora_shared.B"


class SharedMatrices(nn.Module):
    """A pair of adapter matrices that all experts of a layer share, `[rank, width]` each."""

    def __init__(self, in_width: int, out_width: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, in_width, dtype=dtype))
        self.B = nn.Parameter(torch.empty(rank, out_width, dtype=dtype))

    def forward(self, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the values to add to the outputs of `rows [N, in_width]`, `[N, out_width]`."""
        return rows.to(self.A.dtype) @ self.A.T @ self.B * scaling


def initialize(first: torch.Tensor, second: torch.Tensor, settings: AdapterSettings) -> None:
    """Initialize `first` randomly and `second` with zeros, as PEFT does. With `init: random`, both are random."""
    if settings.init == "gaussian":
        nn.init.normal_(first, std=1 / settings.rank)
    else:
        nn.init.kaiming_uniform_(first, a=math.sqrt(5))
    if settings.init == "random":
        nn.init.kaiming_uniform_(second, a=math.sqrt(5))
    else:
        nn.init.zeros_(second)


def widths(module: Any, target: str) -> tuple[int, int]:
    """Return the input and output width of a target of fused experts."""
    stored = stored_in(target, module)
    _, rows, columns = getattr(module, stored).shape
    in_width, out_width = (rows, columns) if module.is_transposed else (columns, rows)
    return in_width, out_width if stored == target else out_width // 2


def attach_to_experts(module: Any, target: str, settings: AdapterSettings, scaling: float, dtype: torch.dtype) -> None:
    """Attach adapter matrices to a target of fused experts."""
    in_width, out_width = widths(module, target)
    if settings.experts == "shared":
        shared = SharedMatrices(in_width, out_width, settings.rank, dtype)
        initialize(shared.A, shared.B, settings)
        module.add_module(f"{target}_lora_shared", shared)
    else:
        first = nn.Parameter(torch.empty(module.num_experts, settings.rank, in_width, dtype=dtype))
        second = nn.Parameter(torch.empty(module.num_experts, settings.rank, out_width, dtype=dtype))
        initialize(first.view(-1, in_width), second.view(-1, out_width), settings)
        first_name, second_name = factor_names(target)
        module.register_parameter(first_name, first)
        module.register_parameter(second_name, second)
    vars(module).setdefault(SCALINGS, {})[target] = scaling


def adapter_of(module: Any, name: str, local_part: Callable[[torch.Tensor], torch.Tensor]) -> AddedRows | None:
    """Return the function that computes what the adapter adds to the projection `name`; None without an adapter.

    Args:
        module: The fused experts.
        name: Name of the projection's parameter.
        local_part: Returns the part of a parameter that belongs to the experts of this rank.
    """
    scalings: Mapping[str, float] = vars(module).get(SCALINGS, {})
    if OFF in vars(module):
        return None

    def added_by(target: str) -> AddedRows | None:
        if target not in scalings:
            return None
        scaling = scalings[target]
        shared = getattr(module, f"{target}_lora_shared", None)
        if shared is not None:
            return lambda rows, counts: shared(rows, scaling)
        first, second = (getattr(module, factor) for factor in factor_names(target))
        return ExpertAdapter(local_part(first).transpose(1, 2), local_part(second), scaling)

    if name != GATE_UP or not set(HALVES) & set(scalings):
        return added_by(name)
    gate, up = map(added_by, HALVES)
    return GateUpAdapter(gate=gate, up=up, is_concatenated=module.is_concatenated)


def merged_delta(module: Any, owner: str, target: str, scaling: float, state: Mapping[str, torch.Tensor]) -> Any:
    """Return what the matrices of a target add to the parameter that contains it, in the layout of that parameter.

    Args:
        module: The fused experts.
        owner: Full name of the experts.
        target: Name of the target in the experts.
        scaling: Factor of the product of the matrices.
        state: Full adapter matrices, keyed by full name.
    """
    if f"{owner}.{shared_names(target)[0]}" in state:
        first, second = (state[f"{owner}.{name}"] for name in shared_names(target))
        added = (first.T @ second).expand(module.num_experts, -1, -1)
    else:
        first, second = (state[f"{owner}.{name}"] for name in factor_names(target))
        added = first.transpose(1, 2) @ second  # [experts, input width, output width]
    added = scaling * added
    if stored_in(target, module) != target:
        added = in_gate_up(added, HALVES.index(target), module.is_concatenated)
    return added if module.is_transposed else added.transpose(1, 2)


def in_gate_up(values: torch.Tensor, half: int, is_concatenated: bool) -> torch.Tensor:
    """Return `values [..., width]` at the places of one half of `gate_up_proj`, with zeros in the other half."""
    halves = [torch.zeros_like(values), torch.zeros_like(values)]
    halves[half] = values
    return torch.cat(halves, -1) if is_concatenated else torch.stack(halves, -1).flatten(-2)
