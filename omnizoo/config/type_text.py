"""Describe the types of config keys in help, docs and error messages, for example as `integer >= 1`."""

from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omnizoo.config.plugins import built_in_names
from omnizoo.config.sections.base import ConfigSection, PythonObject

# Names of Python types in the terms of a config file.
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null", dict: "mapping"}
# Names of pydantic's constraints, and how they are written.
SIGNS = [("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("min_length", "of length >=")]


def sections_in(annotation: Any) -> Iterator[tuple[type[ConfigSection], str]]:
    """Yield each section that a type annotation contains, with the prefix of its keys.

    The prefix is `N.` for a list of sections, `NAME.` for a mapping of sections, and empty for a single section.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        yield annotation, ""
    elif origin in (Union, UnionType):
        for arg in args:
            yield from sections_in(arg)
    elif origin in (list, dict):
        prefix = "N." if origin is list else "NAME."
        for section, inner_prefix in sections_in(args[-1]):
            yield section, prefix + inner_prefix


def choices_in(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    """Yield all values of a type that has a fixed set of them, or the built-in names of a key that accepts plugins.

    Args:
        annotation: The type annotation of the key.
        metadata: Pydantic's metadata of the key, such as validators.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from choices_in(args[0], args[1:])
    elif origin is Literal:
        yield from map(str, args)
    elif origin in (Union, UnionType):
        for arg in args:
            yield from choices_in(arg)
    elif annotation is bool:
        yield from ("true", "false")
    for constraint in metadata:
        for inner in getattr(constraint, "metadata", [constraint]):
            yield from built_in_names(inner)


def with_bounds(text: str, metadata: Sequence[Any]) -> str:
    """Append the bounds of a key to the text of its type: `integer` -> `integer >= 1`."""
    if text == NAMES[str]:  # omit the minimum length of 1 that all texts have
        return text
    bounds = []
    for constraint in metadata:
        for name, sign in SIGNS:
            bound = getattr(constraint, name, None)
            if bound is not None:
                bounds.append(f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}")
    return " ".join([text, ", ".join(bounds)]).strip()


def annotation_text(annotation: Any) -> str:
    """Describe a type annotation in the terms of a config file: `list[int] | None` -> `list of integer or null`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, ConfigSection):
        return "{" + ", ".join(annotation.model_fields) + "}"
    if origin is Annotated:
        return with_bounds(annotation_text(args[0]), args[1].metadata)
    if origin is dict and any(sections_in(annotation)):
        return f"mapping of NAME to {annotation_text(args[1])}"
    if origin is Literal:
        return " or ".join(str(arg) for arg in args)
    if origin in (Union, UnionType):
        # Omit Python objects, because a file cannot contain them.
        return " or ".join(annotation_text(arg) for arg in args if arg is not PythonObject)
    if origin is list:
        return f"list of {annotation_text(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}: {annotation_text(args[0])}"
    return NAMES[origin or annotation]
