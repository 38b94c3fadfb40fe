"""Which parameters a group of `optimizer.groups` means: glob patterns over names, the first group that matches."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import ParameterGroup


class Groups:
    """Ask by the name that `named_parameters` gives; a tied parameter is found under each of its names."""

    def __init__(self, model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
        self._group: dict[str, ParameterGroup] = {}
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False) if groups else ():
            names.setdefault(parameter, []).append(name)
        for i, group in enumerate(groups):
            for pattern in group.patterns:
                key = f"optimizer.groups.{i}.match: {repr(pattern)[:80]}"
                matched = [own[0] for own in names.values() if any(fnmatchcase(name, pattern) for name in own)]
                if not matched:
                    close = get_close_matches(
                        pattern[:200], [name for own in names.values() for name in own], n=3, cutoff=0
                    )
                    raise UserError(f"{key} matches no parameter; the nearest names are {', '.join(close)}")
                if all(self._group.get(name, group) is not group for name in matched):
                    raise UserError(
                        f"{key} matches only parameters that a group before it matches, and the first one decides; "
                        "move it up or leave it out"
                    )
                for name in matched:
                    self._group.setdefault(name, group)

    def of(self, name: str) -> ParameterGroup | None:
        return self._group.get(name)


def matching(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """`groups` without the patterns that mean nothing in `model`, which is a smaller one than they were written for."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    left = []
    for group in groups:
        patterns = [pattern for pattern in group.patterns if any(fnmatchcase(name, pattern) for name in names)]
        if patterns:
            left.append(group.model_copy(update={"match": patterns}))
    return left
