"""Doors: a value in the config that is the name of a built-in part or `package.module:name` of the user's own.

Code is imported only because the user's own config names it. Every mistake is one line that names the key, the value
and what is expected there. Imports nothing heavy, so that names are checked before torch is loaded.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from omnizoo.config.errors import UserError


def check_name(value: str, built_in: Iterable[str], what: str) -> str:
    """`value` if it is a built-in name or looks like one's own; ValueError with the nearest name otherwise."""
    names = list(built_in)
    module, colon, name = value.partition(":")
    if value in names or (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        return value
    raise ValueError(
        f"{value!r} is no built-in {what} ({', '.join(names)}), and one of your own is "
        f"`package.module:name`{nearest(value, names)}"
    )


def resolve(spec: str, key: str, expected: str) -> Any:
    """What `package.module:name` in the config key `key` stands for; `expected` says what should be there."""
    path, _, name = spec.partition(":")
    try:
        module = import_module(path)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{key}: cannot import {spec}: {error}; expected {expected}") from error
    if not hasattr(module, name):
        close = nearest(name, [known for known in vars(module) if not known.startswith("_")])
        raise UserError(f"{key}: {path} has no {name!r}{close}; expected {expected}")
    return getattr(module, name)


def resolve_class(spec: str, key: str, base: type, expected: str) -> Any:
    """`resolve`, for a subclass of `base`."""
    found = resolve(spec, key, expected)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{key}: {spec} is not a subclass of {base.__module__}.{base.__qualname__}; expected {expected}"
        )
    return found


def check_call(target: Callable[..., Any], spec: str, key: str, args: Iterable[Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that `target` (`spec` in the config) does not take, or ones that are missing, before calling."""
    try:
        signature(target).bind(*args, **given)
    except TypeError as error:
        known = takes(target)
        odd = [name for name in given if known is not None and name not in known]
        close = nearest(odd[0], known or ()) if odd else ""
        raise UserError(f"{key}: {spec}{_shown(target)} does not take what it is given: {error}{close}") from error


def takes(target: Callable[..., Any]) -> set[str] | None:
    """The names of the arguments that `target` takes; None: any."""
    parameters = signature(target).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}


def nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(target: Callable[..., Any]) -> str:
    names = [str(parameter).partition(":")[0].partition("=")[0] for parameter in signature(target).parameters.values()]
    return f"({', '.join(names)})"
