"""Which parameters patterns of the config mean: those of `optimizer.groups`, of which the first that matches decides,
and those of `model.freeze`."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.train_section import ParameterGroup
from omnizoo.models.adapter import matches


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


def frozen(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Parameters that `model.freeze` names, themselves or by a module that they are in; a tied one goes by each of its
    names."""
    found: set[str] = set()
    for i, pattern in enumerate(patterns):
        own = _named(model, pattern)
        if not own:
            names = list(dict.fromkeys(place for name, _ in _parameters(model) for place in _places(name)))
            close = get_close_matches(pattern[:200], names, n=3, cutoff=0)
            raise UserError(
                f"model.freeze.{i}: {repr(pattern)[:80]} is no module or parameter; the nearest names are "
                f"{', '.join(close)}"
            )
        found |= own
    return found


def _named(model: nn.Module, pattern: str) -> set[str]:
    """First names of the parameters that a pattern matches."""
    first: dict[nn.Parameter, str] = {}
    found = set()
    for name, parameter in _parameters(model):
        first.setdefault(parameter, name)
        if any(matches(place, pattern) for place in _places(name)):
            found.add(first[parameter])
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _places(name: str) -> list[str]:
    """A parameter, and the modules it is in."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def still_frozen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Those of `model.freeze` that mean something in `model`, which is a smaller one than they were written for."""
    return [pattern for pattern in patterns if _named(model, pattern)]


def matching(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """`groups` without the patterns that mean nothing in `model`, which is a smaller one than they were written for."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    left = []
    for group in groups:
        patterns = [pattern for pattern in group.patterns if any(fnmatchcase(name, pattern) for name in names)]
        if patterns:
            left.append(group.model_copy(update={"match": patterns}))
    return left
