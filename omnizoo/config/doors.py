"""Doors: a value in the config that is the name of a built-in part or `package.module:name` of the user's own.

Code is imported only because the user's own config names it. Every mistake is one line that names the key, the value
and what is expected there. Imports nothing heavy, so that names are checked before torch is loaded.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from omnizoo.config.errors import UserError, named_line

# What somebody else's code raises when it is imported, or called with what it cannot use.
CODE_ERRORS = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError),
    *(NameError, SyntaxError, ImportError, OSError, MemoryError),
)


def check_name(value: str, built_in: Iterable[str], what: str) -> str:
    """`value` if it is a built-in name or looks like one's own; ValueError with the nearest name otherwise."""
    names = list(built_in)
    if value in names:
        return value
    try:
        return check_own_name(value, what)
    except ValueError:
        raise ValueError(
            f"{repr(value)[:80]} is no built-in {what} ({', '.join(names)}), and one of your own is "
            f"`package.module:name`{nearest(value, names)}"
        ) from None


def check_own_name(value: str, what: str) -> str:
    """`value` if it looks like `package.module:name`; ValueError otherwise. For doors without built-in parts."""
    module, _, name = value.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{value!r:.80} is not the name of {what}")
    return value


def resolve(spec: str, key: str, expected: str) -> Any:
    """What `package.module:name` in the config key `key` stands for; `expected` says what should be there."""
    path, _, name = spec.partition(":")
    try:
        module = import_module(path)
        if name in vars(module) or hasattr(module, name):  # some packages import a name when it is asked for
            return getattr(module, name)
    except CODE_ERRORS as error:
        raise UserError(f"{key}: cannot import {spec}: {named_line(error)}; expected {expected}") from error
    close = nearest(name, [known for known in vars(module) if not known.startswith("_")])
    raise UserError(f"{key}: cannot import {spec}: {path} has no {name!r}{close}; expected {expected}")


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
    known = takes(target)
    odd = [name for name in given if known is not None and name not in known]
    try:
        signature(target).bind(*args, **given)
        if odd:
            raise TypeError(f"got an unexpected keyword argument {odd[0]!r}")
    except ValueError:  # some functions in C tell nothing about themselves
        return
    except TypeError as error:
        close = nearest(odd[0], known or ()) if odd else ""
        raise UserError(f"{key}: {spec}{_shown(target)} does not take what it is given: {error}{close}") from error


def call(spec: str, key: str, expected: str, options: Mapping[str, Any]) -> Any:
    """What the class or function `spec` of the config key `key` gives for `options`."""
    target = resolve(spec, key, expected)
    if not callable(target):
        raise UserError(f"{key}: {spec} is a {type(target).__name__}; expected {expected}")
    check_call(target, spec, key, [], options)
    try:
        return target(**options)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{key}: {spec} fails: {named_line(error)}; expected {expected}") from error


def takes(target: Callable[..., Any]) -> dict[str, Parameter] | None:
    """The arguments that `target` takes by name; None: any, or nobody knows. A class that hands others on to its base
    takes those of its base, too."""
    calls: list[Any] = [target]
    if isinstance(target, type):
        calls = [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)]
    found: dict[str, Parameter] = {}
    for one in calls:
        try:
            parameters = signature(one).parameters
        except ValueError:
            return None
        named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        own = list(parameters.values())[isinstance(target, type) :]  # without `self`
        found = {p.name: p for p in own if p.kind in named} | found
        if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            return found
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _shown(target: Callable[..., Any]) -> str:
    names = [str(parameter).partition(":")[0].partition("=")[0] for parameter in signature(target).parameters.values()]
    return f"({', '.join(names)})"
