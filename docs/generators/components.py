"""Built-in encoders, projectors, decoders, losses and optimizers: options with types, defaults and descriptions."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import griffe

from generators.markdown import code, sentence, table
from generators.source import assigned_value, constant, member
from omnizoo.config.sections.loss_options import LOSSES
from omnizoo.config.sections.optimizer_options import OPTIMIZERS
from omnizoo.config.type_text import annotation_text

# Arguments that config keys other than `options` set.
NOT_OPTIONS = {"self", "width", "config", "folder", "projector", "width_in", "width_out", "times", "dimensions"}
# Defaults of optimizers that other libraries implement.
LIBRARY_DEFAULTS = {"amsgrad": False, "fused": True, "block_size": 256}
HEADER = ("option", "type", "default", "description")


def encoders() -> str:
    """Return a section for each built-in encoder."""
    return _modality_classes("encoder")


def decoders() -> str:
    """Return a section for each built-in decoder."""
    return _modality_classes("decoder")


def _modality_classes(role: str) -> str:
    parts = []
    for kind, target in constant("omnizoo.modalities.build", "BUILT_IN")[role].items():
        cls = _class(target)
        parts.append(_entry(kind, cls, _option_rows(cls, _parameters(cls), NOT_OPTIONS)))
    return "\n".join(parts)


def projectors() -> str:
    """Return a table with the options of all projectors."""
    module = "omnizoo.modalities.encoders.projector"
    kinds = assigned_value(module, "KINDS")
    assert isinstance(kinds, ast.Dict)
    rows: list[tuple[str, ...]] = []
    for key, value in zip(kinds.keys, kinds.values, strict=True):
        assert isinstance(key, ast.Constant)
        assert isinstance(value, ast.Name)
        cls = _class(f"{module}:{value.id}")
        rows += [(code(str(key.value)), *row[:-1]) for row in _option_rows(cls, _parameters(cls), NOT_OPTIONS)]
    return table(("kind", *HEADER[:-1]), rows)


def losses() -> str:
    """Return a section for each built-in loss."""
    targets = _targets("omnizoo.training.losses.base", "KINDS")
    parts = []
    for kind, known in LOSSES.items():
        cls = _class(targets[kind])
        parts.append(_entry(kind, cls, _checked_options(cls, known, {})))
    return "\n".join(parts)


def optimizers() -> str:
    """Return a table with the options of all built-in optimizers."""
    module = "omnizoo.training.optimizers.build"
    targets = _targets(module, "KINDS")
    defaults = LIBRARY_DEFAULTS | constant(module, "BETAS")
    rows: list[tuple[str, ...]] = []
    for kind, known in OPTIMIZERS.items():
        rows += [(code(kind), *row[:-1]) for row in _checked_options(_class(targets[kind]), known, defaults)]
    return table(("kind", *HEADER[:-1]), rows)


def _targets(module: str, name: str) -> dict[str, str]:
    """Return the classes in a table of built-in kinds, as `module:Class`, by kind."""
    table_node = assigned_value(module, name)
    assert isinstance(table_node, ast.Dict)
    targets: dict[str, str] = {}
    for key, value in zip(table_node.keys, table_node.values, strict=True):
        texts = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
        named = [text for text in texts if isinstance(text, str) and ":" in text]
        if isinstance(key, ast.Constant) and named:
            targets[str(key.value)] = named[0]
    return targets


def _checked_options(
    cls: griffe.Class, known: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[tuple[str, str, str, str]]:
    """Return rows for options whose types and bounds are in the config package."""
    parameters = _parameters(cls)
    described = _descriptions(cls)
    rows = []
    for name, annotation in known.items():
        default = str(parameters[name].default) if name in parameters and parameters[name].default else ""
        if name in defaults and not default:
            default = repr(defaults[name])
        rows.append((code(name), annotation_text(annotation), code(_as_yaml(default)), described.get(name, "")))
    return rows


def _class(target: str) -> griffe.Class:
    module, _, name = target.partition(":")
    cls = member(module, name)
    assert isinstance(cls, griffe.Class)
    return cls


def _entry(kind: str, cls: griffe.Class, rows: list[tuple[str, str, str, str]]) -> str:
    """Return the section of one kind: what the class is, and its options."""
    text = _summary(cls)
    parts = [f"### {kind}\n", text + "\n"]
    if rows and not any(row[-1] for row in rows):
        parts.append(table(HEADER[:-1], [row[:-1] for row in rows]))
    elif rows:
        parts.append(table(HEADER, rows))
    return "\n".join(parts)


def _summary(cls: griffe.Class) -> str:
    """Return the text of a class docstring before its arguments."""
    for docstring in _docstrings(cls):
        return re.split(r"\n\n(?:Args|Example|Returns|Raises)s?:", docstring.value)[0].strip()
    return ""


def _docstrings(cls: griffe.Class) -> Iterator[griffe.Docstring]:
    if cls.docstring is not None:
        yield cls.docstring
    if "__init__" in cls.members and cls.members["__init__"].docstring is not None:
        yield cls.members["__init__"].docstring


def _parameters(cls: griffe.Class) -> dict[str, griffe.Parameter]:
    """Return the parameters of the constructors of a class and its bases, those of the class first."""
    parameters: dict[str, griffe.Parameter] = {}
    for base in (cls, *cls.mro()):
        init = base.members.get("__init__")
        if isinstance(init, griffe.Function):
            for parameter in init.parameters:
                is_named = parameter.kind not in (griffe.ParameterKind.var_keyword, griffe.ParameterKind.var_positional)
                if is_named:
                    parameters.setdefault(parameter.name, parameter)
    return parameters


def _descriptions(cls: griffe.Class) -> dict[str, str]:
    """Return the descriptions of constructor arguments, from the docstrings of a class and its bases."""
    descriptions: dict[str, str] = {}
    for base in (cls, *cls.mro()):
        for docstring in _docstrings(base):
            for section in docstring.parse("google"):
                if section.kind == griffe.DocstringSectionKind.parameters:
                    for entry in section.value:
                        descriptions.setdefault(entry.name, sentence(entry.description))
    return descriptions


def _option_rows(
    cls: griffe.Class, parameters: Mapping[str, griffe.Parameter], excluded: set[str]
) -> list[tuple[str, str, str, str]]:
    described = _descriptions(cls)
    rows = []
    for name, parameter in parameters.items():
        if name not in excluded or (name == "times" and "VideoEncoder" in cls.name):
            default = "required" if parameter.default is None else code(_as_yaml(str(parameter.default)))
            rows.append((code(name), _type(parameter), default, described.get(name, "")))
    return rows


def _type(parameter: griffe.Parameter) -> str:
    """Return the annotation of a parameter in the words of the configuration reference."""
    words = {"int": "integer", "float": "number", "bool": "true or false", "str": "text", "None": "null"}
    annotation = str(parameter.annotation or "")
    annotation = annotation.replace("Sequence[int]", "list of integer").replace("Sequence[float]", "list of number")
    names = [words.get(name, name) for name in annotation.split(" | ")]
    return " or ".join(names)


def _as_yaml(default: str) -> str:
    """Return a Python default as YAML: `True` -> `true`, `'linear'` -> `linear`, `(0.9, 0.95)` -> `[0.9, 0.95]`."""
    constants = {"None": "null", "True": "true", "False": "false", "COEFFICIENTS": "as in torch"}
    if default in constants:
        return constants[default]
    if default.startswith("(") and default.endswith(")"):
        default = f"[{default[1:-1]}]".replace("None", "null")
    return default.strip("'\"")
