"""Match parameter patterns from `optimizer.groups` (the first match wins) and from `model.freeze`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.sections.optimizer import ParameterGroupSettings
from omnizoo.models.adapters.lora import matches, nearest_names
from omnizoo.models.user_module import tied_names


def group_parameters(model: nn.Module, groups: Sequence[ParameterGroupSettings]) -> dict[str, ParameterGroupSettings]:
    """Return the group of each matched parameter, keyed by its name in `named_parameters`.

    A pattern may match any name of a tied parameter.
    """
    group_of: dict[str, ParameterGroupSettings] = {}
    parameters = tied_names(model) if groups else []
    for i, group in enumerate(groups):
        for pattern in group.patterns:
            key = f"optimizer.groups.{i}.match: {repr(pattern)[:80]}"
            matched = [names[0] for names in parameters if any(fnmatchcase(name, pattern) for name in names)]
            if not matched:
                nearest = nearest_names(pattern, [name for names in parameters for name in names])
                raise UserError(f"{key} matches no parameter; {nearest}")
            if all(group_of.get(name, group) is not group for name in matched):
                raise UserError(
                    f"{key} matches only parameters of earlier groups, and the first matching group applies. "
                    "Move the group up, or remove the pattern."
                )
            for name in matched:
                group_of.setdefault(name, group)
    return group_of


def frozen(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the parameters whose name, or the name of a module that contains them, matches `model.freeze`.

    A pattern may match any name of a tied parameter.
    """
    frozen_names: set[str] = set()
    for i, pattern in enumerate(patterns):
        matched = _matched_parameters(model, pattern)
        if not matched:
            paths = [path for names in tied_names(model) for name in names for path in _paths(name)]
            nearest = nearest_names(pattern, paths)
            raise UserError(f"model.freeze.{i}: {repr(pattern)[:80]} matches no module or parameter; {nearest}")
        frozen_names |= matched
    return frozen_names


def _matched_parameters(model: nn.Module, pattern: str) -> set[str]:
    """Return the parameters that a pattern matches, by their names in `named_parameters`."""
    matched = set()
    for names in tied_names(model):
        if any(matches(path, pattern) for name in names for path in _paths(name)):
            matched.add(names[0])
    return matched


def _paths(name: str) -> list[str]:
    """Return the name of a parameter and the names of the modules that contain it."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def still_frozen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the patterns of `model.freeze` that match a parameter of `model`, a small copy of the original model."""
    return [pattern for pattern in patterns if _matched_parameters(model, pattern)]


def matching(model: nn.Module, groups: Sequence[ParameterGroupSettings]) -> list[ParameterGroupSettings]:
    """Return `groups` without the patterns that match nothing in `model`, a small copy of the original model."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matching_groups = []
    for group in groups:
        patterns = [pattern for pattern in group.patterns if any(fnmatchcase(name, pattern) for name in names)]
        if patterns:
            matching_groups.append(group.model_copy(update={"match": patterns}))
    return matching_groups
