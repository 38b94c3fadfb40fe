"""Plugins: user code that a config names as `package.module:name`, often instead of a built-in name.

Only code that the config names is imported. The form of names is checked when the config is loaded, before torch is
imported. An error is one line with the config key, the name and the expected kind of object.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

from pydantic import AfterValidator

from omnizoo.config.errors import UserError, named_line

PLUGIN_KEYS = ("kind", "module", "recipe", "rows", "schedule")  # a key with one of these names may name a plugin
# Errors that imports and calls of user code may raise.
CODE_ERRORS = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError),
    *(NameError, SyntaxError, ImportError, OSError, MemoryError),
)


def check_name(value: str, built_in: Iterable[str], what: str) -> str:
    """Check that `value` is a built-in name or has the form `package.module:name`.

    Args:
        value: The value in the config.
        built_in: The built-in names.
        what: What the names stand for, such as "loss". Error messages contain it.

    Returns:
        The unchanged value.

    Raises:
        ValueError: If the value is neither. The message suggests the most similar built-in name.
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
    """Return a validator for keys whose value is a built-in name or `package.module:name`.

    Args:
        built_in: The built-in names.
        what: What the names stand for, such as "loss". Error messages contain it.
    """
    return AfterValidator(partial(check_name, built_in=built_in, what=what))


def built_in_names(validator: Any) -> list[str]:
    """Return the built-in names that a validator from `built_in_or_plugin` accepts; empty for other validators."""
    function = getattr(validator, "func", None)
    if isinstance(function, partial) and function.func is check_name:
        return list(function.keywords["built_in"])
    return []


def plugin(what: str) -> AfterValidator:
    """Return a validator for keys whose value has the form `package.module:name`.

    Args:
        what: Description of the expected object. Error messages contain it.
    """
    return AfterValidator(partial(check_plugin_name, what=what))


def check_plugin_name(value: str, what: str) -> str:
    """Check that `value` has the form `package.module:name`.

    Args:
        value: The value in the config.
        what: Description of the expected object. Error messages contain it.

    Returns:
        The unchanged value.

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
        key: The config key that contains the name.
        expected: Description of the object that the key expects, for error messages.

    Returns:
        The object.

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
    """Import a subclass of `base`.

    Args:
        spec: The name of the class, as `package.module:name`.
        key: The config key that contains the name.
        base: The required base class.
        expected: Description of the class that the key expects, for error messages.

    Returns:
        The class.

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
    """Check that a plugin can be called with the given arguments, without calling it.

    Args:
        target: The plugin: a function or class.
        spec: The name of the plugin in the config.
        key: The config key that contains the name.
        args: Positional arguments.
        options: Keyword arguments.

    Raises:
        UserError: If the signature of `target` does not accept the arguments.
    """
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
    """Import a class or function and call it.

    Args:
        spec: The name of the class or function, as `package.module:name`.
        key: The config key that contains the name.
        expected: Description of the object that the key expects, for error messages.
        options: Keyword arguments of the call.

    Returns:
        The result of the call.

    Raises:
        UserError: If the import or the call fails.
    """
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
    """Return the keyword parameters of a function or class; None if it accepts any keyword or has no signature.

    If the constructor of a class has `**kwargs`, the parameters of its base class's constructor are included.
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
        for parameter in parameters[isinstance(target, type) :]:  # skip `self` of a constructor
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                keywords.setdefault(parameter.name, parameter)
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
            return keywords
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint "; did you mean ...?" with the most similar of the known names; empty if none is similar."""
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
    """Check that the user allows all plugins that a file names. The file may come from an untrusted source.

    Args:
        settings: The config in the file, or a part of it, as plain values.
        allow_code: Modules that the user allows. Their submodules are included.
        file: Name of the file, for the error message.
        alternative: What the user can do instead of `--allow-code`, for the error message.

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
    """Yield every plugin name (`package.module:name`) in a config.

    Args:
        value: The config, or a part of it, as plain values.
        key: Last part of the key whose value it is; empty for a whole config.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from named_code(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from named_code(inner, key)
    elif key in PLUGIN_KEYS and isinstance(value, str) and ":" in value:
        yield value
