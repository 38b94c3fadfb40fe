"""Plugins: config values that are either a built-in name or refer to user code as `package.module:name`.

Only code that the config names is imported. Each mistake is reported in one line with the key, the value and the
expected kind. Names are checked before torch is imported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from pydantic import AfterValidator

from omnizoo.config.errors import UserError, named_line

PLUGIN_KEYS = ("kind", "module", "recipe", "rows", "schedule")  # keys that may name a plugin, in any section
# Errors that user code may raise when it is imported or called.
CODE_ERRORS = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError),
    *(NameError, SyntaxError, ImportError, OSError, MemoryError),
)


def check_name(value: str, built_in: Iterable[str], what: str) -> str:
    """Return `value` if it is a built-in name or `package.module:name`.

    Raises:
        ValueError: If `value` is neither. The message suggests the closest built-in name.
    """
    names = list(built_in)
    if value in names:
        return value
    try:
        return check_plugin_name(value, what)
    except ValueError:
        raise ValueError(
            f"{repr(value)[:80]} is not a built-in {what} ({', '.join(names)}), nor `package.module:name` of a plugin"
            f"{nearest(value, names)}"
        ) from None


def built_in_or_plugin(built_in: Iterable[str], what: str) -> AfterValidator:
    """Return a validator for keys that contain a built-in name or `package.module:name`."""
    return AfterValidator(partial(check_name, built_in=built_in, what=what))


def built_in_names(validator: Any) -> list[str]:
    """Return the built-in names that a validator of `built_in_or_plugin` accepts; empty for other metadata."""
    function = getattr(validator, "func", None)
    if isinstance(function, partial) and function.func is check_name:
        return list(function.keywords["built_in"])
    return []


def plugin(what: str) -> AfterValidator:
    """Return a validator for keys that contain `package.module:name`."""
    return AfterValidator(partial(check_plugin_name, what=what))


def check_plugin_name(value: str, what: str) -> str:
    """Return `value` if it has the form `package.module:name`.

    Raises:
        ValueError: If it has another form.
    """
    module, _, name = value.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{value!r:.80} is not the name of {what}")
    return value


def resolve(spec: str, key: str, expected: str) -> Any:
    """Import the object `package.module:name`.

    Args:
        spec: The name of the object.
        key: The config key that contains it.
        expected: The kind of object that the key expects, for messages.

    Raises:
        UserError: If the import fails.
    """
    path, _, name = spec.partition(":")
    try:
        module = import_module(path)
        if name in vars(module) or hasattr(module, name):  # some packages import names lazily
            return getattr(module, name)
    except CODE_ERRORS as error:
        raise UserError(f"{key}: cannot import {spec}: {named_line(error)}; expected {expected}") from error
    close = nearest(name, [known for known in vars(module) if not known.startswith("_")])
    raise UserError(f"{key}: cannot import {spec}: {path} has no {name!r}{close}; expected {expected}")


def resolve_class(spec: str, key: str, base: type, expected: str) -> Any:
    """Import a subclass of `base`. See `resolve` for the other arguments.

    Raises:
        UserError: If the import fails, or the object is not a subclass of `base`.
    """
    cls = resolve(spec, key, expected)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(
            f"{key}: {spec} is not a subclass of {base.__module__}.{base.__qualname__}; expected {expected}"
        )
    return cls


def check_call(
    target: Callable[..., Any], spec: str, key: str, args: Iterable[Any], options: Mapping[str, Any]
) -> None:
    """Raise `UserError` if `target`, which `spec` names in the config, cannot be called with these arguments."""
    parameters = keyword_parameters(target)
    unknown = [name for name in options if parameters is not None and name not in parameters]
    try:
        signature(target).bind(*args, **options)
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    except ValueError:  # some C functions have no signature
        return
    except TypeError as error:
        hint = nearest(unknown[0], parameters or ()) if unknown else ""
        raise UserError(f"{key}: {spec}{_parameter_names(target)} cannot be called: {error}{hint}") from error


def call(spec: str, key: str, expected: str, options: Mapping[str, Any]) -> Any:
    """Call the class or function `spec`, which the config key `key` names, with `options`, and return its result."""
    target = resolve(spec, key, expected)
    if not callable(target):
        raise UserError(f"{key}: {spec} is a {type(target).__name__}; expected {expected}")
    check_call(target, spec, key, [], options)
    try:
        return target(**options)
    except UserError:
        raise
    except CODE_ERRORS as error:
        raise UserError(f"{key}: {spec} failed: {named_line(error)}; expected {expected}") from error


def keyword_parameters(target: Callable[..., Any]) -> dict[str, Parameter] | None:
    """Return the keyword parameters of `target`; None if it accepts any keyword or has no signature.

    A class that passes further arguments on to its base class also accepts those of its base class.
    """
    functions: list[Any] = [target]
    if isinstance(target, type):
        functions = [vars(cls)["__init__"] for cls in target.__mro__ if "__init__" in vars(cls)]
    keywords: dict[str, Parameter] = {}
    for function in functions:
        try:
            parameters = list(signature(function).parameters.values())
        except ValueError:
            return None
        for parameter in parameters[isinstance(target, type) :]:  # without `self`
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                keywords.setdefault(parameter.name, parameter)
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            return keywords
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the most similar name; empty if none is similar."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _parameter_names(target: Callable[..., Any]) -> str:
    """Return the parameters of `target` without types and defaults: `(model, *, beta)`."""
    names = []
    for parameter in signature(target).parameters.values():
        name_and_type = str(parameter).partition("=")[0]
        names.append(name_and_type.partition(":")[0])
    return f"({', '.join(names)})"


def check_allowed(settings: Any, allow_code: Sequence[str], file: str, alternative: str) -> None:
    """Check that the command line allows all code that a file from a possibly untrusted source names.

    Args:
        settings: The config in the file, or a part of it, as plain values.
        allow_code: Modules that the command line allows, with their submodules.
        file: Name of the file, for messages.
        alternative: What to do instead of `--allow-code`, for messages.

    Raises:
        UserError: If a plugin is not allowed.
    """
    for name in named_code(settings):
        module = name.partition(":")[0]
        if not any(module == allowed or module.startswith(f"{allowed}.") for allowed in allow_code):
            raise UserError(
                f"{file}: the plugin {name} is not allowed. If you trust it, add --allow-code {module}, or "
                f"{alternative}."
            )


def named_code(value: Any, key: str = "") -> Iterator[str]:
    """Yield every plugin name (`package.module:name`) in a config."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from named_code(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from named_code(inner, key)
    elif key in PLUGIN_KEYS and isinstance(value, str) and ":" in value:
        yield value
